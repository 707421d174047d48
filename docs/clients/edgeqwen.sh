# Functions for a POSIX shell (dash, bash, busybox) that ask a running edgeqwen daemon. Source this file: . ./edgeqwen.sh
#
#   eq_ask [-s SESSION] [-t] [-n N] [PROMPT...]   stream the answer to stdout; without PROMPT it is read from stdin
#   eq_json ['{"op":...}']                        one request as it is (or from stdin); its frames to stdout, one a line
#   eq_socket                                     print the path of the socket that the two would use
#
# SESSION is the name of a conversation that the daemon keeps (or its id). -t lets the model think first; what it thinks
# goes to stderr. -n allows N tokens; an answer that was cut at its limit is told on stderr. The exit code is 0 once the
# final frame has come, else what docs/protocol.md says of the error (64 bad request, 65 too long, 70 engine, 75 try
# again, 77 not allowed), 69 without a daemon, 74 if the answer was cut off, 78 if the path is too long. The reason is
# one line on stderr.
#
# Needs sed, awk, and socat, nc with -U, or curl, whichever is found first ($EQ_TRANSPORT set to one of these chooses).
# jq is not needed, but the frames of eq_json go well into it. Text must be UTF-8. Nothing is left in the caller's shell:
# each function runs in a subshell.

eq_socket() (
    own=${XDG_RUNTIME_DIR-}/edgeqwen.sock
    if [ -n "${EDGEQWEN_SOCKET_PATH-}" ]; then
        printf '%s\n' "$EDGEQWEN_SOCKET_PATH"
    elif [ "${own#/}" != "$own" ] && [ -n "${XDG_RUNTIME_DIR-}" ] && [ -e "$own" ] && [ "$(id -u)" != 0 ]; then
        printf '%s\n' "$own"
    else
        printf '/run/edgeqwen/edgeqwen.sock\n'
    fi
)

eq_ask() (
    LC_ALL=C # bytes, whatever the terminal speaks
    export LC_ALL
    session='' think='' limit='' OPTIND=1
    usage='usage: eq_ask [-s SESSION] [-t] [-n N] [PROMPT...]'
    while getopts s:tn:h option; do
        case $option in
        s) session=$OPTARG ;;
        t) think=',"think":true' ;;
        n) limit=$OPTARG ;;
        h)
            printf '%s\n' "$usage"
            exit 0
            ;;
        *)
            printf '%s\n' "$usage" >&2
            exit 64
            ;;
        esac
    done
    case $limit in *[!0-9]* | 0?*) _eq_fail 64 "-n takes a number of tokens; $usage" ;; esac
    [ -z "$limit" ] || limit=",\"max_tokens\":$limit"
    shift $((OPTIND - 1))
    if [ $# -gt 0 ]; then prompt=$*; else prompt=$(cat); fi
    [ -n "$prompt" ] || _eq_fail 64 'nothing to ask: give a prompt as arguments or on stdin'
    case $session in
    '' | @*) ;;
    s_*[!a-z0-9]*) session=@$session ;;
    s_????????????????) ;;
    *) session=@$session ;;
    esac
    [ -z "$session" ] || session=",\"session\":\"$(_eq_escape "$session")\""
    request="{\"op\":\"chat\",\"stream\":true,\"close\":true$session$think$limit,\"prompt\":\"$(_eq_escape "$prompt")\"}"
    _eq_exchange text "$request"
)

eq_json() (
    LC_ALL=C
    export LC_ALL
    if [ $# -gt 0 ]; then request=$*; else request=$(cat); fi
    _eq_exchange json "$(printf '%s' "$request" | tr '\n' ' ')" # in JSON a line break stands between tokens only
)

_eq_fail() {
    printf 'edgeqwen: %s\n' "$2" >&2
    exit "$1"
}

# $1 as the inside of a JSON string: quotes, backslashes and control characters escaped, line breaks too.
_eq_escape() {
    printf '%s\n' "$1" | sed -e 's/[\\"]/\\&/g' -e "$(
        awk 'BEGIN { for (i = 1; i < 32; i++) if (i != 10) printf "s/%c/\\\\u%04x/g\n", i, i }'
    )" -e '$!s/$/\\n/' | tr -d '\n'
}

# The string member $1 of the frame $2, whose bytes "$1":" occur nowhere else: within a string a quote has a backslash.
_eq_member() {
    case $2 in *"\"$1\":\""*) ;; *) return ;; esac
    rest=${2#*"\"$1\":\""}
    plain=${rest%%\"*}
    case $plain in
    *\\*) printf '%s\n' "$rest" | awk "$_eq_unescape" ;;
    *) printf '%s' "$plain" ;;
    esac
}

# From the first byte of a JSON string to its end, as UTF-8; half a surrogate pair becomes U+FFFD.
# shellcheck disable=SC2016 # the dollar signs are awk's
_eq_unescape='
function hex(s,    i, n) {
    for (i = 1; i <= 4; i++) n = n * 16 + index("0123456789abcdef", tolower(substr(s, i, 1))) - 1
    return n
}
function utf8(n) {
    if (n < 128) printf "%c", n
    else if (n < 2048) printf "%c%c", 192 + int(n / 64), 128 + n % 64
    else if (n < 65536) printf "%c%c%c", 224 + int(n / 4096), 128 + int(n / 64) % 64, 128 + n % 64
    else printf "%c%c%c%c", 240 + int(n / 262144), 128 + int(n / 4096) % 64, 128 + int(n / 64) % 64, 128 + n % 64
}
BEGIN { plain["n"] = "\n"; plain["t"] = "\t"; plain["r"] = "\r"; plain["b"] = "\b"; plain["f"] = "\f" }
{
    while (match($0, /["\\]/)) {
        printf "%s", substr($0, 1, RSTART - 1)
        if (substr($0, RSTART, 1) == "\"") exit
        c = substr($0, RSTART + 1, 1)
        rest = substr($0, RSTART + 2)
        if (c == "u") {
            n = hex(rest)
            rest = substr(rest, 5)
            if (n >= 55296 && n < 56320 && rest ~ /^\\u[dD][c-fC-F]/) {
                n = 65536 + (n - 55296) * 1024 + hex(substr(rest, 3)) - 56320
                rest = substr(rest, 7)
            } else if (n >= 55296 && n < 57344) n = 65533
            utf8(n)
        } else printf "%s", (c in plain) ? plain[c] : c
        $0 = rest
    }
}'

# Sends the request $2 and reads its frames; shows them as $1 says. What comes last tells how the transport ended.
_eq_exchange() {
    socket=$(eq_socket)
    [ ${#socket} -le 107 ] || _eq_fail 78 "$socket: socket path has ${#socket} bytes, the limit is 107; shorten it"
    [ -S "$socket" ] || _eq_fail 69 "$socket: no daemon; start one with: edgeqwen serve"
    [ -w "$socket" ] || _eq_fail 77 "$socket: this user may not connect to the daemon"
    transport=${EQ_TRANSPORT-}
    if [ -n "$transport" ]; then
        case $transport in
        socat | nc | curl) ;;
        *) _eq_fail 64 "EQ_TRANSPORT=$transport is no transport; set it to socat, nc or curl, or leave it out" ;;
        esac
        command -v "$transport" >/dev/null || _eq_fail 69 "EQ_TRANSPORT: $transport is not installed"
    elif command -v socat >/dev/null; then
        transport=socat
    elif command -v nc >/dev/null && _eq_nc_has U; then
        transport=nc
    elif command -v curl >/dev/null; then
        transport=curl
    fi
    case $transport in
    socat | nc | curl) ;;
    *) _eq_fail 69 'neither socat nor nc with -U nor curl is installed' ;;
    esac
    {
        printf '%s\n' "$2" | "_eq_by_$transport" "$2"
        printf 'end %s\n' "$?" # right behind a frame that was cut off, which shows that it was
    } 2>/dev/null | _eq_read "$1"
}

_eq_nc_has() { nc -h 2>&1 | grep -q "^[[:space:]]*-$1[[:space:],]"; }

# What means something to socat in an address is escaped in the path. After the end of input the daemon sends an empty line
# every 250 ms until it answers, so a minute of silence means that it is gone.
_eq_by_socat() { socat -t 60 - "UNIX-CONNECT:$(printf '%s' "$socket" | sed 's/[][(){}<>,:!"'\''\\]/\\&/g')"; }

_eq_by_nc() { if _eq_nc_has N; then nc -N -U "$socket"; else nc -U "$socket"; fi; }

_eq_by_curl() {
    op=$(printf '%s' "$1" | awk '
        { line = line $0 }
        END {
            if (!match(line, /"op"[ \t]*:[ \t]*"[a-z._]*"/)) exit
            split(substr(line, RSTART, RLENGTH), part, "\"")
            print part[4]
        }')
    curl -sN --unix-socket "$socket" -H 'Content-Type: application/json' --data-binary @- "http://edgeqwen/eqp/$op"
}

_eq_read() {
    is_silent=1 ended='' is_thinking='' cr=$(printf '\r')
    while IFS= read -r frame || [ -n "$frame" ]; do
        [ ${#frame} -le 300000 ] || _eq_fail 74 'the daemon sent something that is too long for a frame'
        frame=${frame%"$cr"}
        case $frame in
        '') continue ;;
        '{'*'"done":true'*'}' | '{'*'"done":false'*'}') is_silent='' ;;
        'end '*)
            ended=$frame
            break
            ;;
        *) _eq_fail 74 'the daemon sent something that is not a frame' ;;
        esac
        if [ "$1" = json ]; then
            printf '%s\n' "$frame"
        else
            case $frame in '{"id":'*) continue ;; esac # the answer to somebody else's request
            _eq_show "$frame"
        fi
        case $frame in *'"done":true'*) _eq_end "$1" "$frame" ;; esac
    done
    [ -z "$is_silent" ] || [ "$ended" = 'end 0' ] || _eq_fail 69 "$socket: no daemon; start one with: edgeqwen serve"
    _eq_fail 74 'the connection ended before the answer did'
}

_eq_show() {
    case $1 in
    *'"reasoning":"'*)
        is_thinking=1
        _eq_member reasoning "$1" >&2
        ;;
    *'"delta":"'*)
        [ -z "$is_thinking" ] || printf '\n\n' >&2
        is_thinking=''
        _eq_member delta "$1"
        ;;
    esac
}

# Ends with the exit code of the final frame $2. On a terminal the next thing starts on a new line.
_eq_end() {
    if [ "$1" = text ] && [ -t 1 ]; then printf '\n'; fi
    case $2 in
    *'"error":{'*) ;;
    *)
        case $1$2 in text*'"finish":"length"'*) printf 'edgeqwen: the answer was cut at its limit; -n allows more\n' >&2 ;; esac
        exit 0
        ;;
    esac
    error=${2#*'"error":{'}
    code=$(_eq_member code "$error")
    case $code in
    bad_json | bad_utf8 | too_large | timeout | too_long) number=65 ;;
    bad_request | unknown_op | unsupported_version | duplicate_id) number=64 ;;
    not_found) number=69 ;;
    slow_reader) number=74 ;;
    conflict | session_busy | busy | quota | loading | draining) number=75 ;;
    forbidden) number=77 ;;
    bad_config) number=78 ;;
    *) number=70 ;;
    esac
    _eq_fail "$number" "$(_eq_member message "$error") ($code)"
}
