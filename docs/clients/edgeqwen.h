/* edgeqwen.h: ask a running edgeqwen daemon from C99. One header, no allocation, no library besides libc (POSIX.1-2008).
 *
 * In one source file, before anything else:   #define EDGEQWEN_IMPLEMENTATION
 *                                             #include "edgeqwen.h"
 * elsewhere only the include. `ask.c` is an example. A request is one connection: eq_chat() connects, sends, closes its
 * sending half, gives the text to a callback as it comes, and returns what a program may exit with: 0 once the final
 * frame has come, else what docs/protocol.md says of the error, 69 without a daemon, 74 if the answer was cut off,
 * 78 for a path that is too long.
 *
 * What it relies on: a frame is a line of at most EQ_FRAME_BYTES (streamed frames have at most 32 KiB), begins with `id`
 * if it has one, and has `done`. Blank lines say that the daemon is still at work: after the sending half is closed one
 * comes at least every 250 ms, so silence for as long as `timeout_ms` means that it is not. Unknown members, and frames
 * of other ids, are ignored. Not all of JSON is checked: what is no frame is an error, and no input reads or writes
 * outside of the buffers.
 *
 * All memory is in eq_reply, which a program may make static; one for each thread that asks.
 */
#ifndef EDGEQWEN_H
#define EDGEQWEN_H

#ifdef EDGEQWEN_IMPLEMENTATION
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#endif

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef EQ_FRAME_BYTES
#define EQ_FRAME_BYTES (32 << 10) /* make it 256 << 10 to ask for answers in one piece with eq_json() */
#endif

enum eq_kind {
    EQ_TEXT,       /* a piece of the answer, UTF-8, whole characters */
    EQ_REASONING,  /* a piece of the thought before it */
    EQ_TOOL_CALLS, /* a JSON array of calls, as it came; calls with the same `id` are pieces of one */
    EQ_FRAME       /* eq_json() only: a whole frame, as it came */
};

/* Gets `num_bytes` bytes (there is a NUL behind them, and there may be NULs among them) that are only valid during the
 * call. Anything but 0 hangs up, which makes the daemon stop; the exit code is then 130. */
typedef int (*eq_callback)(void *user, enum eq_kind kind, const char *data, size_t num_bytes);

/* What is not needed is NULL or 0. */
typedef struct {
    const char *socket_path; /* NULL: $EDGEQWEN_SOCKET_PATH, else the user's own daemon, else the system's */
    const char *prompt;
    const char *system;
    const char *session;     /* "@name", or the id of a session */
    const char *members;     /* more members of the request, JSON: "\"max_tokens\":64,\"think\":false" */
    int timeout_ms;          /* the longest silence; 0 is 30 s */
} eq_request;

typedef struct {
    int exit_code;
    char code[32];           /* "" without an error; the daemon's, or no_daemon, cut_off, silent, bad_path, stopped */
    char field[64];          /* the member of the request that the error is about, or "" */
    char message[256];       /* for people */
    long retry_ms;           /* when a busy daemon may be asked again, or -1 */
    char finish[16];         /* stop, length, cancelled, deadline, tool_calls */
    const char *final_frame; /* the final frame as it came, NUL at its end; NULL if there was none; see eq_find() */
    size_t final_bytes;
    /* private */
    int fd, timeout_ms;
    size_t start, end, num_out;
    char out[1024];
    char frame[EQ_FRAME_BYTES + 1];
} eq_reply;

/* A streamed chat. Returns reply->exit_code; the members above are set either way. */
int eq_chat(eq_reply *reply, const eq_request *request, eq_callback callback, void *user);

/* Any one request, a JSON object: eq_json(&reply, path, 0, "{\"op\":\"health\"}", ...). The callback gets whole frames and
 * may be NULL. */
int eq_json(eq_reply *reply, const char *socket_path, int timeout_ms, const char *json, eq_callback callback, void *user);

/* The value of a member of a JSON object, as it stands there (strings with their quotes), or NULL; its length in
 * *num_bytes. Only the object's own members count, not those further inside. */
const char *eq_find(const char *object, size_t object_bytes, const char *name, size_t *num_bytes);

/* A JSON string (with its quotes) as UTF-8 into `text`, NUL at its end; gives the length without it. What does not fit in
 * `text_bytes` is cut off between characters. `text` may be where the string is. No string: "" and 0. */
size_t eq_unescape(const char *string, size_t string_bytes, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif /* EDGEQWEN_H */

#if defined(EDGEQWEN_IMPLEMENTATION) && !defined(EDGEQWEN_IMPLEMENTED)
#define EDGEQWEN_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#error "include edgeqwen.h before any other header, or compile with -D_POSIX_C_SOURCE=200809L"
#endif

/* ---- Reading JSON: pointers that never pass `end`. */

static const char *eq__skip_blank(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')) at++;
    return at;
}

/* Behind the value at `at`, or NULL if it does not end before `end`. */
static const char *eq__skip_value(const char *at, const char *end) {
    size_t depth = 0;
    const char *begin = at;
    for (; at < end; at++) {
        if (*at == '"') {
            for (at++; at < end && *at != '"'; at++)
                if (*at == '\\' && end - at > 1) at++;
            if (at >= end) return NULL;
            if (depth == 0) return at + 1;
        } else if (*at == '{' || *at == '[') {
            depth++;
        } else if (*at == '}' || *at == ']') {
            if (depth == 0) return at > begin ? at : NULL; /* a number or a word ended before it */
            if (--depth == 0) return at + 1;
        } else if (depth == 0 && (*at == ',' || *at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')) {
            return at > begin ? at : NULL;
        }
    }
    return NULL;
}

const char *eq_find(const char *object, size_t object_bytes, const char *name, size_t *num_bytes) {
    const char *end = object + object_bytes, *at = eq__skip_blank(object, end), *key, *value;
    size_t key_bytes, name_bytes = strlen(name);
    *num_bytes = 0;
    if (at >= end || *at != '{') return NULL;
    at = eq__skip_blank(at + 1, end);
    while (at < end && *at == '"') {
        key = at + 1;
        at = eq__skip_value(at, end);
        if (at == NULL) return NULL;
        key_bytes = (size_t)(at - key) - 1;
        at = eq__skip_blank(at, end);
        if (at >= end || *at != ':') return NULL;
        value = eq__skip_blank(at + 1, end);
        at = value < end ? eq__skip_value(value, end) : NULL;
        if (at == NULL) return NULL;
        if (key_bytes == name_bytes && memcmp(key, name, name_bytes) == 0) {
            *num_bytes = (size_t)(at - value);
            return value;
        }
        at = eq__skip_blank(at, end);
        if (at >= end || *at != ',') return NULL;
        at = eq__skip_blank(at + 1, end);
    }
    return NULL;
}

/* The four hexadecimal digits behind "\u", or -1. */
static long eq__hex(const char *at, const char *end) {
    long value = 0;
    int i;
    if (end - at < 4) return -1;
    for (i = 0; i < 4; i++) {
        char c = at[i];
        if (c >= '0' && c <= '9') value = value * 16 + (c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') value = value * 16 + (c - 'A' + 10);
        else return -1;
    }
    return value;
}

static size_t eq__utf8(unsigned long point, char *text) {
    static const unsigned char marks[] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t num_bytes = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4, i;
    for (i = num_bytes - 1; i > 0; i--, point >>= 6) text[i] = (char)(unsigned char)(0x80 | (point & 0x3F));
    text[0] = (char)(unsigned char)(num_bytes == 1 ? point : (marks[num_bytes] | point));
    return num_bytes;
}

/* The character behind the backslash at *at, which is moved behind it. Half a surrogate pair is U+FFFD. */
static unsigned long eq__escaped(const char **at, const char *end) {
    static const char names[] = "nrtbf", values[] = "\n\r\t\b\f";
    const char *found;
    long unit, low;
    char c = (*at)[1];
    *at += 2;
    if (c != 'u') return (unsigned char)(((found = strchr(names, c)) != NULL && c) ? values[found - names] : c);
    unit = eq__hex(*at, end);
    if (unit < 0) return 0xFFFD;
    *at += 4;
    if (unit < 0xD800 || unit > 0xDFFF) return (unsigned long)unit;
    if (unit < 0xDC00 && end - *at >= 6 && (*at)[0] == '\\' && (*at)[1] == 'u') {
        low = eq__hex(*at + 2, end);
        if (low >= 0xDC00 && low <= 0xDFFF) {
            *at += 6;
            return 0x10000UL + ((unsigned long)(unit - 0xD800) << 10) + (unsigned long)(low - 0xDC00);
        }
    }
    return 0xFFFD;
}

size_t eq_unescape(const char *string, size_t string_bytes, char *text, size_t text_bytes) {
    const char *end = string + string_bytes, *at = string + 1;
    size_t used = 0, num_bytes, i;
    char point[4];
    if (text_bytes == 0) return 0;
    if (string_bytes < 2 || *string != '"') end = at;
    while (at < end && *at != '"') {
        if (*at == '\\' && end - at >= 2) {
            num_bytes = eq__utf8(eq__escaped(&at, end), point);
        } else { /* with the bytes that continue its character */
            for (num_bytes = 0; num_bytes == 0 || (num_bytes < 4 && at < end && (*at & 0xC0) == 0x80); at++)
                point[num_bytes++] = *at;
        }
        if (used + num_bytes >= text_bytes) break;
        for (i = 0; i < num_bytes; i++) text[used++] = point[i];
    }
    text[used] = '\0';
    return used;
}

static int eq__is(const char *value, size_t num_bytes, const char *word) {
    return value != NULL && num_bytes == strlen(word) && memcmp(value, word, num_bytes) == 0;
}

static void eq__member_text(const char *object, size_t object_bytes, const char *name, char *text, size_t text_bytes) {
    size_t num_bytes;
    const char *value = eq_find(object, object_bytes, name, &num_bytes);
    text[0] = '\0';
    if (value != NULL) eq_unescape(value, num_bytes, text, text_bytes);
}

/* ---- How a request ended. */

static int eq__fail(eq_reply *reply, int exit_code, const char *code, const char *message) {
    reply->exit_code = exit_code;
    reply->code[0] = reply->message[0] = '\0';
    strncat(reply->code, code, sizeof reply->code - 1);
    strncat(reply->message, message, sizeof reply->message - 1);
    return exit_code;
}

static int eq__cut_off(eq_reply *reply) {
    return eq__fail(reply, 74, "cut_off", "the connection ended before the answer did");
}

static int eq__silent(eq_reply *reply) {
    return eq__fail(reply, 74, "silent", "the daemon has been silent for too long");
}

static int eq__exit_code(const char *code) {
    static const struct {
        const char *code;
        int exit_code;
    } table[] = {
        {"bad_json", 65},    {"bad_utf8", 65},       {"too_large", 65},           {"timeout", 65},
        {"too_long", 65},    {"bad_request", 64},    {"unknown_op", 64},          {"unsupported_version", 64},
        {"not_found", 69},   {"duplicate_id", 64},   {"forbidden", 77},           {"conflict", 75},
        {"busy", 75},        {"session_busy", 75},   {"quota", 75},               {"loading", 75},
        {"draining", 75},    {"slow_reader", 74},    {"bad_config", 78},
    };
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].code, code) == 0) return table[i].exit_code;
    return 70; /* engine, and what there may be one day */
}

static int eq__end(eq_reply *reply, const char *frame, size_t num_bytes) {
    size_t error_bytes, value_bytes;
    const char *error = eq_find(frame, num_bytes, "error", &error_bytes), *value;
    reply->final_frame = frame;
    reply->final_bytes = num_bytes;
    eq__member_text(frame, num_bytes, "finish", reply->finish, sizeof reply->finish);
    if (error == NULL) return reply->exit_code = 0;
    eq__member_text(error, error_bytes, "code", reply->code, sizeof reply->code);
    eq__member_text(error, error_bytes, "field", reply->field, sizeof reply->field);
    eq__member_text(error, error_bytes, "message", reply->message, sizeof reply->message);
    value = eq_find(error, error_bytes, "retry_ms", &value_bytes);
    if (value != NULL) reply->retry_ms = strtol(value, NULL, 10); /* ends at the latest at the frame's NUL */
    return reply->exit_code = eq__exit_code(reply->code);
}

/* ---- The socket. It does not block: poll() waits, and knows for how long. */

static long long eq__now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Whether the socket became ready before the time was over. A signal does not start the time anew. */
static int eq__wait(const eq_reply *reply, short events) {
    struct pollfd ready;
    long long give_up_at = eq__now_ms() + reply->timeout_ms, left;
    int found;
    ready.fd = reply->fd;
    ready.events = events;
    for (;;) {
        left = give_up_at - eq__now_ms();
        found = poll(&ready, 1, left > 0 ? (int)left : 0);
        if (found >= 0 || errno != EINTR) return found > 0;
    }
}

static const char *eq__socket_path(const char *given, char *own, size_t own_bytes) {
    const char *folder;
    if (given != NULL && *given) return given;
    given = getenv("EDGEQWEN_SOCKET_PATH");
    if (given != NULL && *given) return given;
    folder = getenv("XDG_RUNTIME_DIR");
    if (geteuid() != 0 && folder != NULL && *folder == '/' && strlen(folder) + sizeof "/edgeqwen.sock" <= own_bytes) {
        strcpy(own, folder);
        strcat(own, "/edgeqwen.sock");
        if (access(own, F_OK) == 0) return own;
    }
    return "/run/edgeqwen/edgeqwen.sock";
}

static int eq__connect(eq_reply *reply, const char *path, int timeout_ms) {
    struct sockaddr_un address;
    char own[sizeof address.sun_path];
    long long give_up_at;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    reply->code[0] = reply->field[0] = reply->message[0] = reply->finish[0] = '\0';
    reply->retry_ms = -1;
    reply->final_frame = NULL;
    reply->final_bytes = reply->start = reply->end = reply->num_out = 0;
    reply->fd = -1;
    reply->timeout_ms = timeout_ms > 0 ? timeout_ms : 30000;
    path = eq__socket_path(path, own, sizeof own);
    if (strlen(path) >= sizeof address.sun_path)
        return eq__fail(reply, 78, "bad_path", "the socket's path has more than 107 bytes; shorten it");
    memcpy(address.sun_path, path, strlen(path) + 1);
    reply->fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (reply->fd < 0) return eq__fail(reply, 69, "no_daemon", "no socket could be made");
    fcntl(reply->fd, F_SETFD, FD_CLOEXEC);
    fcntl(reply->fd, F_SETFL, O_NONBLOCK);
    give_up_at = eq__now_ms() + reply->timeout_ms;
    while (connect(reply->fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        if (errno == EACCES || errno == EPERM)
            return eq__fail(reply, 77, "forbidden", "this user may not connect to the daemon");
        if (errno != EAGAIN && errno != EINTR)
            return eq__fail(reply, 69, "no_daemon", "no daemon; start one with: edgeqwen serve");
        if (eq__now_ms() >= give_up_at) return eq__fail(reply, 69, "no_daemon", "the daemon does not answer");
        poll(NULL, 0, 20); /* as many others wait to be accepted as may */
    }
    return 0;
}

/* Sends what waits in `out`. A daemon that turns a connection away closes it at once; its reason can still be read then,
 * so a broken connection is no error here. */
static int eq__flush(eq_reply *reply) {
    size_t sent = 0;
    ssize_t num_bytes;
    while (sent < reply->num_out) {
        num_bytes = send(reply->fd, reply->out + sent, reply->num_out - sent, MSG_NOSIGNAL);
        if (num_bytes >= 0) sent += (size_t)num_bytes;
        else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!eq__wait(reply, POLLOUT)) return eq__silent(reply);
        } else if (errno != EINTR) break;
    }
    reply->num_out = 0;
    return 0;
}

static int eq__put(eq_reply *reply, const char *text) {
    size_t num_bytes = strlen(text), part;
    for (; num_bytes > 0; text += part, num_bytes -= part) {
        if (reply->num_out == sizeof reply->out && eq__flush(reply) != 0) return reply->exit_code;
        part = sizeof reply->out - reply->num_out;
        if (part > num_bytes) part = num_bytes;
        memcpy(reply->out + reply->num_out, text, part);
        reply->num_out += part;
    }
    return 0;
}

static int eq__put_string(eq_reply *reply, const char *text) {
    static const char digits[] = "0123456789abcdef";
    char piece[7];
    if (eq__put(reply, "\"") != 0) return reply->exit_code;
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        size_t num_bytes = 0;
        if (c == '"' || c == '\\') {
            piece[num_bytes++] = '\\';
            piece[num_bytes++] = *text;
        } else if (c < 0x20) {
            memcpy(piece, "\\u00", 4);
            piece[4] = digits[c >> 4];
            piece[5] = digits[c & 15];
            num_bytes = 6;
        } else {
            piece[num_bytes++] = *text;
        }
        piece[num_bytes] = '\0';
        if (eq__put(reply, piece) != 0) return reply->exit_code;
    }
    return eq__put(reply, "\"");
}

/* The next frame that is not blank, NUL behind it, or NULL: reply->exit_code says why. */
static char *eq__next_frame(eq_reply *reply, size_t *num_bytes) {
    size_t searched = 0;
    for (;;) {
        char *start = reply->frame + reply->start, *end;
        end = memchr(start + searched, '\n', reply->end - reply->start - searched);
        if (end != NULL) {
            reply->start = (size_t)(end - reply->frame) + 1;
            searched = 0;
            *end = '\0';
            if (end > start && end[-1] == '\r') *--end = '\0';
            *num_bytes = (size_t)(end - start);
            if (*num_bytes > 0) return start;
            continue;
        }
        searched = reply->end - reply->start;
        if (reply->start > 0) {
            memmove(reply->frame, start, searched);
            reply->start = 0;
            reply->end = searched;
        }
        if (reply->end == EQ_FRAME_BYTES) {
            eq__fail(reply, 74, "cut_off", "the daemon sent a frame of more than EQ_FRAME_BYTES");
            return NULL;
        }
        for (;;) {
            ssize_t got = recv(reply->fd, reply->frame + reply->end, EQ_FRAME_BYTES - reply->end, 0);
            if (got > 0) {
                reply->end += (size_t)got;
                break;
            }
            if (got < 0 && errno == EINTR) continue;
            if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                if (eq__wait(reply, POLLIN)) continue;
                eq__silent(reply);
                return NULL;
            }
            eq__cut_off(reply);
            return NULL;
        }
    }
}

/* Where a member of a frame in the buffer is, NULL if there is none. */
static char *eq__member(eq_reply *reply, const char *frame, size_t num_bytes, const char *name, size_t *value_bytes) {
    const char *value = eq_find(frame, num_bytes, name, value_bytes);
    return value == NULL ? NULL : reply->frame + (value - reply->frame);
}

/* Gives what a frame of a chat carries to the callback. Strings are unescaped where they are, which only a frame that
 * nobody looks at again allows: the final one has none. */
static int eq__give(eq_reply *reply, const char *frame, size_t num_bytes, int is_final, eq_callback callback, void *user) {
    size_t reasoning_bytes, text_bytes, calls_bytes;
    char *reasoning = eq__member(reply, frame, num_bytes, "reasoning", &reasoning_bytes);
    char *text = eq__member(reply, frame, num_bytes, "delta", &text_bytes);
    char *calls = eq__member(reply, frame, num_bytes, "tool_calls", &calls_bytes), behind;
    int is_stopped = 0;
    if (callback == NULL) return 0;
    if (calls != NULL) {
        behind = calls[calls_bytes]; /* there is a brace at least */
        calls[calls_bytes] = '\0';
        is_stopped = callback(user, EQ_TOOL_CALLS, calls, calls_bytes);
        calls[calls_bytes] = behind;
    }
    if (reasoning != NULL && !is_final && !is_stopped) {
        reasoning_bytes = eq_unescape(reasoning, reasoning_bytes, reasoning, reasoning_bytes);
        if (reasoning_bytes > 0) is_stopped = callback(user, EQ_REASONING, reasoning, reasoning_bytes);
    }
    if (text != NULL && !is_final && !is_stopped) {
        text_bytes = eq_unescape(text, text_bytes, text, text_bytes);
        if (text_bytes > 0) is_stopped = callback(user, EQ_TEXT, text, text_bytes);
    }
    return is_stopped;
}

/* Reads up to the final frame, once the request is in `out` or sent. */
static int eq__answer(eq_reply *reply, int is_chat, eq_callback callback, void *user) {
    size_t num_bytes, value_bytes;
    int is_final, is_stopped;
    if (eq__put(reply, "\n") != 0 || eq__flush(reply) != 0) return reply->exit_code;
    shutdown(reply->fd, SHUT_WR);
    for (;;) {
        const char *frame = eq__next_frame(reply, &num_bytes), *done;
        if (frame == NULL) return reply->exit_code;
        done = eq_find(frame, num_bytes, "done", &value_bytes);
        is_final = eq__is(done, value_bytes, "true");
        if (!is_final && !eq__is(done, value_bytes, "false"))
            return eq__fail(reply, 74, "cut_off", "the daemon sent something that is not a frame");
        if (is_chat) {
            if (eq_find(frame, num_bytes, "id", &value_bytes) != NULL) continue; /* no answer to this request */
            is_stopped = eq__give(reply, frame, num_bytes, is_final, callback, user);
        } else {
            is_stopped = callback != NULL && callback(user, EQ_FRAME, frame, num_bytes);
        }
        if (is_final) return eq__end(reply, frame, num_bytes);
        if (is_stopped) return eq__fail(reply, 130, "stopped", "the callback asked to stop");
    }
}

static int eq__put_chat(eq_reply *reply, const eq_request *request) {
    const char *prompt = request->prompt != NULL ? request->prompt : "";
    if (eq__put(reply, "{\"op\":\"chat\",\"stream\":true") != 0) return reply->exit_code;
    if (request->session != NULL && (eq__put(reply, ",\"session\":") != 0 || eq__put_string(reply, request->session) != 0))
        return reply->exit_code;
    if (request->system != NULL) {
        if (eq__put(reply, ",\"messages\":[{\"role\":\"system\",\"content\":") != 0 ||
            eq__put_string(reply, request->system) != 0 || eq__put(reply, "},{\"role\":\"user\",\"content\":") != 0 ||
            eq__put_string(reply, prompt) != 0 || eq__put(reply, "}]") != 0)
            return reply->exit_code;
    } else if (request->prompt != NULL) {
        if (eq__put(reply, ",\"prompt\":") != 0 || eq__put_string(reply, prompt) != 0) return reply->exit_code;
    }
    if (request->members != NULL && (eq__put(reply, ",") != 0 || eq__put(reply, request->members) != 0))
        return reply->exit_code;
    return eq__put(reply, "}");
}

static int eq__close(eq_reply *reply) {
    if (reply->fd >= 0) close(reply->fd);
    reply->fd = -1;
    return reply->exit_code;
}

int eq_chat(eq_reply *reply, const eq_request *request, eq_callback callback, void *user) {
    if (eq__connect(reply, request->socket_path, request->timeout_ms) == 0 && eq__put_chat(reply, request) == 0)
        eq__answer(reply, 1, callback, user);
    return eq__close(reply);
}

int eq_json(eq_reply *reply, const char *socket_path, int timeout_ms, const char *json, eq_callback callback, void *user) {
    if (eq__connect(reply, socket_path, timeout_ms) == 0 && eq__put(reply, json) == 0)
        eq__answer(reply, 0, callback, user);
    return eq__close(reply);
}

#endif /* EDGEQWEN_IMPLEMENTATION */
