/* ask SOCKET PROMPT [SESSION]: the answer to stdout as it comes, the thought before it to stderr; exits as eq_chat() says.
 * SOCKET may be "" for the usual one. Build: cc -std=c99 -O2 ask.c -o ask
 */
#define EDGEQWEN_IMPLEMENTATION
#include "edgeqwen.h"

#include <stdio.h>

static eq_reply reply; /* 34 KiB, and no other memory */

static int show(void *user, enum eq_kind kind, const char *data, size_t num_bytes) {
    FILE *stream = kind == EQ_TEXT ? stdout : stderr;
    (void)user;
    fwrite(data, 1, num_bytes, stream);
    return fflush(stream) != 0; /* nobody reads: hang up, and the daemon stops */
}

int main(int argc, char **argv) {
    char session[300] = "@";
    eq_request request = {0};
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: %s SOCKET PROMPT [SESSION]\n", argv[0]);
        return 64;
    }
    request.socket_path = argv[1];
    request.prompt = argv[2];
    if (argc == 4) {
        strncat(session, argv[3], sizeof session - 2);
        request.session = session;
    }
    eq_chat(&reply, &request, show, NULL);
    if (reply.exit_code == 0) return 0;
    fprintf(stderr, "%s: %s", argv[0], reply.message);
    if (reply.field[0]) fprintf(stderr, " (%s)", reply.field);
    if (reply.retry_ms >= 0) fprintf(stderr, "; again in %ld ms", reply.retry_ms);
    fputc('\n', stderr);
    return reply.exit_code;
}
