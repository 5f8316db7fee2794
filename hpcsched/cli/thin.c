/* hsub, hqueue, hcancel, sbatch, squeue and scancel as thin clients: hand words, script and environment to the controller,
 * and print what it answers. The same words on the wire as thin.py, which runs where no compiler was; see
 * hpcsched/api/command.py for the answer.
 *
 * Knows no options and no formats. What it cannot do itself (no controller, a terminal to read from, text that is not UTF-8,
 * an answer "python") the Python command does: it is executed in this process, and says what is wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SCRIPT = 256 << 10, MAX_CONFIG = 1 << 20, TIMEOUT_S = 60, STDIN_SCRIPT = -1, NO_SCRIPT = -2 };

struct text {
    char *bytes;
    size_t length, room;
};

extern char **environ;
static char **words;
static const char *name;
static char request_id[33];

static void put_bytes(struct text *to, const char *bytes, size_t length) {
    if (to->length + length > to->room) {
        to->room = 2 * (to->length + length) + 4096;
        to->bytes = realloc(to->bytes, to->room);
        if (!to->bytes) abort();
    }
    memcpy(to->bytes + to->length, bytes, length);
    to->length += length;
}

static void put(struct text *to, const char *text) { put_bytes(to, text, strlen(text)); }

/* Execute the Python command in the place of this one: bin/hpcsched-command beside this program. */
static void python(void) {
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    size_t count = 0;
    while (words[count]) count++;
    char **argv = calloc(count + 2, sizeof *argv);
    if (length <= 0 || !argv) abort();
    path[length] = 0;
    strcpy(strrchr(path, '/'), "/hpcsched-command");
    argv[0] = path;
    argv[1] = (char *)name;
    for (size_t at = 1; at < count; at++) argv[at + 1] = words[at];
    execv(path, argv);
    fprintf(stderr, "%s: error: cannot run %s: %s\n", name, path, strerror(errno));
    exit(1);
}

/* Return the length of the UTF-8 character at `s`, 0 if it is none that a text may have (Unicode, table 3-7). */
static size_t character(const unsigned char *s, const unsigned char *end) {
    if (*s < 0x80) return *s ? 1 : 0;
    size_t more = *s >= 0xC2 && *s <= 0xDF ? 1 : *s >= 0xE0 && *s <= 0xEF ? 2 : *s >= 0xF0 && *s <= 0xF4 ? 3 : 0;
    if (!more || (size_t)(end - s) <= more) return 0;
    for (size_t at = 1; at <= more; at++)
        if ((s[at] & 0xC0) != 0x80) return 0;
    if ((*s == 0xE0 && s[1] < 0xA0) || (*s == 0xED && s[1] > 0x9F) || (*s == 0xF0 && s[1] < 0x90) || (*s == 0xF4 && s[1] > 0x8F))
        return 0;
    return more + 1;
}

/* Append `bytes` as a JSON text. What is not UTF-8, or has a NUL, is left to Python. */
static void put_json(struct text *to, const char *bytes, size_t length) {
    const unsigned char *s = (const unsigned char *)bytes, *end = s + length;
    char escaped[8];
    put(to, "\"");
    while (s < end) {
        size_t size = character(s, end);
        if (!size) python();
        if (*s == '"' || *s == '\\' || *s < 0x20) {
            snprintf(escaped, sizeof escaped, "\\u%04x", *s);
            put(to, escaped);
        } else
            put_bytes(to, (const char *)s, size);
        s += size;
    }
    put(to, "\"");
}

static void put_field(struct text *to, const char *field, const char *value) {
    put(to, field);
    put_json(to, value, strlen(value));
}

/* Append all of the file to `to`; return whether it could be read and has at most `most` bytes. */
static int read_all(int fd, struct text *to, size_t most) {
    char block[65536];
    ssize_t got;
    while ((got = read(fd, block, sizeof block)) > 0) {
        put_bytes(to, block, (size_t)got);
        if (to->length > most) return 0;
    }
    return got == 0;
}

/* ----- where the controller listens: as hpcsched/paths.py says. Returns 0 where that takes more than is read here. */

static int join(char *to, size_t room, const char *first, const char *second) {
    return (size_t)snprintf(to, room, "%s/%s", first, second) < room;
}

static int below(char *to, size_t room, const char *variable, const char *below_home, const char *last) {
    const char *base = getenv(variable), *home = getenv("HOME");
    if (base && base[0] == '/') return join(to, room, base, last);
    return home && home[0] && (size_t)snprintf(to, room, "%s/%s/%s", home, below_home, last) < room;
}

static int find_socket(char *to, size_t room) {
    char config[4096], own[4096], file[4096 + 32], state[4096];
    struct text toml = {0};
    const char *given = getenv("HPCSCHED_API"), *runtime = getenv("XDG_RUNTIME_DIR");
    if (given && given[0]) return (size_t)snprintf(to, room, "%s", given) < room;
    given = getenv("HPCSCHED_CONFIG");
    int named = given && given[0], personal = getuid() != 0;
    if (personal && !below(own, sizeof own, "XDG_CONFIG_HOME", ".config", "hpcsched")) return 0;
    if (named && given[0] != '/') return 0;
    if ((size_t)snprintf(config, sizeof config, "%s", named ? given : personal ? own : "/etc/hpcsched") >= sizeof config) return 0;
    join(file, sizeof file, config, "hpcsched.toml");
    if (!named && personal && access(file, F_OK) && !access("/etc/hpcsched/hpcsched.toml", F_OK)) {
        strcpy(config, "/etc/hpcsched");
        join(file, sizeof file, config, "hpcsched.toml");
    }
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 ? !read_all(fd, &toml, MAX_CONFIG) : errno != ENOENT) return 0;
    if (fd >= 0) close(fd);
    put_bytes(&toml, "", 1);
    for (char *line = strtok(toml.bytes, "\n"); line; line = strtok(NULL, "\n")) {
        line += strspn(line, " \t");
        if (*line != '#' && (strstr(line, "run_dir") || strstr(line, "state_dir"))) return 0; /* TOML is for Python */
    }
    if (!strcmp(config, "/etc/hpcsched")) return (size_t)snprintf(to, room, "/run/hpcsched/api.sock") < room;
    if (!personal && !below(own, sizeof own, "XDG_CONFIG_HOME", ".config", "hpcsched")) own[0] = 0;
    if (strcmp(config, own)) return join(to, room, config, "state/run/api.sock");
    if (runtime && runtime[0]) return runtime[0] == '/' && join(to, room, runtime, "hpcsched/api.sock");
    return below(state, sizeof state, "XDG_STATE_HOME", ".local/state", "hpcsched") && join(to, room, state, "run/api.sock");
}

/* ----- the request */

static void put_environment(struct text *to) {
    static const struct { const char *kind; int number; } limits[] = {
        {"AS", RLIMIT_AS}, {"CORE", RLIMIT_CORE}, {"CPU", RLIMIT_CPU}, {"DATA", RLIMIT_DATA}, {"FSIZE", RLIMIT_FSIZE},
        {"MEMLOCK", RLIMIT_MEMLOCK}, {"NOFILE", RLIMIT_NOFILE}, {"NPROC", RLIMIT_NPROC}, {"RSS", RLIMIT_RSS},
        {"STACK", RLIMIT_STACK},
    };
    char mask[32], noted[512] = "HPCSCHED_RLIMITS=";
    mode_t old = umask(077);
    umask(old);
    snprintf(mask, sizeof mask, "SLURM_UMASK=%04o", (unsigned)old);
    for (size_t at = 0; at < sizeof limits / sizeof *limits; at++) {
        struct rlimit limit;
        getrlimit((__rlimit_resource_t)limits[at].number, &limit);
        size_t end = strlen(noted);
        snprintf(noted + end, sizeof noted - end, "%s%s=%lld", at ? "," : "", limits[at].kind, (long long)limit.rlim_cur);
    }
    for (char **one = environ; *one; one++)
        if (strncmp(*one, "SLURM_UMASK=", 12) && strncmp(*one, "HPCSCHED_RLIMITS=", 17)) {
            put_json(to, *one, strlen(*one));
            put(to, ",");
        }
    put_json(to, mask, strlen(mask));
    put(to, ",");
    put_json(to, noted, strlen(noted));
}

/* Append the file that is the word at `at` to `script`; return whether it can be sent. */
static int read_script(int at, struct text *script) {
    struct stat found;
    int fd = open(words[at], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return 0;
    int sent = !fstat(fd, &found) && S_ISREG(found.st_mode) && read_all(fd, script, MAX_SCRIPT);
    close(fd);
    for (size_t seen = 0, size; sent && seen < script->length; seen += size) {
        size = character((unsigned char *)script->bytes + seen, (unsigned char *)script->bytes + script->length);
        sent = size > 0;
    }
    return sent;
}

/* Read the script from standard input, which is put back for Python. */
static void read_stdin(struct text *script) {
    int again = memfd_create("stdin", 0);
    if (isatty(0) || again < 0) python();
    int whole = read_all(0, script, 16 * MAX_SCRIPT); /* Python refuses a longer one */
    for (size_t done = 0; done < script->length;) {
        ssize_t wrote = write(again, script->bytes + done, script->length - done);
        if (wrote <= 0) abort();
        done += (size_t)wrote;
    }
    lseek(again, 0, SEEK_SET);
    dup2(again, 0);
    if (!whole || script->length > MAX_SCRIPT) python();
}

static void put_request(struct text *to, const struct text *script, int script_at) {
    char directory[4096], numbers[160];
    struct utsname host;
    struct winsize window = {0};
    struct text body = {0};
    time_t now = time(NULL);
    struct tm local;
    if (!getcwd(directory, sizeof directory) || uname(&host) || !localtime_r(&now, &local)) python();
    put_field(&body, "{\"command\":", name);
    put(&body, ",\"argv\":[");
    for (char **word = words + 1; *word; word++) {
        put_json(&body, *word, strlen(*word));
        if (word[1]) put(&body, ",");
    }
    put(&body, "],\"environ\":[");
    put_environment(&body);
    put_field(&body, "],\"work_dir\":", directory);
    put_field(&body, ",\"host\":", host.nodename);
    put_field(&body, ",\"request_id\":", request_id);
    if (script_at != NO_SCRIPT) {
        put(&body, ",\"script\":");
        put_json(&body, script->bytes ? script->bytes : "", script->length);
        snprintf(numbers, sizeof numbers, ",\"script_at\":%d", script_at);
        put(&body, numbers);
    }
    int columns = ioctl(1, TIOCGWINSZ, &window) ? 0 : window.ws_col;
    snprintf(numbers, sizeof numbers, ",\"width\":%d,\"out_is_terminal\":%s,\"err_is_terminal\":%s,\"utc_offset_s\":%ld}", columns,
             isatty(1) ? "true" : "false", isatty(2) ? "true" : "false", local.tm_gmtoff);
    put(&body, numbers);
    snprintf(numbers, sizeof numbers,
             "POST /v1/command HTTP/1.1\r\nHost: hpcsched\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", body.length);
    put(to, numbers);
    put_bytes(to, body.bytes, body.length);
    free(body.bytes);
}

/* Return a connection to the controller, which must be root or ourselves. */
static int connected(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer;
    struct timeval patience = {.tv_sec = TIMEOUT_S};
    socklen_t size = sizeof peer;
    if (!find_socket(address.sun_path, sizeof address.sun_path)) python();
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) python();
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || (peer.uid != 0 && peer.uid != getuid())) python();
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    return fd;
}

/* Nobody knows whether the request took effect. A submission is repeated under its id, a look at the queue as well. */
static void lost(void) {
    if (strcmp(name, "hcancel") && strcmp(name, "scancel")) {
        setenv("HPCSCHED_REQUEST_ID", request_id, 1);
        python();
    }
    if (name[0] == 's') fprintf(stderr, "scancel: error: Kill job error: Unable to contact slurm controller (connect failure)\n");
    fprintf(stderr, "%s: error: lost the connection to the hpcsched controller before it answered\n", name);
    exit(1);
}

/* Send the request; return the body of the answer, ended by a NUL. */
static char *ask(const struct text *request, size_t *length) {
    struct text answer = {0};
    char block[65536], *body = NULL;
    size_t wanted = 0;
    int fd = connected();
    for (size_t sent = 0; sent < request->length;) {
        ssize_t wrote = send(fd, request->bytes + sent, request->length - sent, MSG_NOSIGNAL);
        if (wrote <= 0) break; /* it may have said why */
        sent += (size_t)wrote;
    }
    while (!body || (size_t)(answer.bytes + answer.length - body) < wanted) {
        size_t start = body ? (size_t)(body - answer.bytes) : 0;
        ssize_t got = recv(fd, block, sizeof block, 0);
        if (got <= 0) lost();
        put_bytes(&answer, block, (size_t)got);
        if (!start) {
            char *head = memmem(answer.bytes, answer.length, "\r\n\r\n", 4);
            if (!head) continue;
            char *size = memmem(answer.bytes, (size_t)(head - answer.bytes), "\r\nContent-Length: ", 18);
            if (strncmp(answer.bytes, "HTTP/1.1 200 ", 13) || !size) python(); /* nothing was done */
            wanted = strtoul(size + 18, NULL, 10);
            start = (size_t)(head + 4 - answer.bytes);
        }
        body = answer.bytes + start;
    }
    close(fd);
    *length = wanted;
    size_t start = (size_t)(body - answer.bytes);
    put_bytes(&answer, "", 1);
    return answer.bytes + start;
}

/* Print the answer, and exit; return the place of the script if the controller wants it. */
static int obey(char *body, size_t length) {
    for (char *at = body, *end = body + length; at < end;) {
        char *line = at, *rest;
        at = memchr(at, '\n', (size_t)(end - at));
        if (!at) break;
        at++;
        if (!strncmp(line, "exit ", 5)) exit((int)strtol(line + 5, NULL, 10));
        if (!strncmp(line, "script ", 7)) return (int)strtol(line + 7, NULL, 10);
        if (!strncmp(line, "python", 6)) python();
        int fd = (int)strtol(line, &rest, 10);
        size_t size = strtoul(rest, NULL, 10);
        if ((fd != 1 && fd != 2) || size > (size_t)(end - at)) break;
        for (ssize_t wrote; size; at += wrote, size -= (size_t)wrote)
            if ((wrote = write(fd, at, size)) < 0) {
                if (errno != EPIPE) fprintf(stderr, "%s: error: cannot write: %s\n", name, strerror(errno));
                exit(1); /* with EPIPE the reader has seen enough */
            }
    }
    fprintf(stderr, "%s: error: cannot read the controller's answer\n", name);
    exit(1);
}

int main(int argc, char **argv) {
    unsigned char random[16];
    struct text script = {0};
    int script_at = NO_SCRIPT;
    const char *slash = strrchr(argv[0], '/');
    words = argv;
    name = slash ? slash + 1 : argv[0];
    signal(SIGPIPE, SIG_IGN);
    if (getenv("HPCSCHED_JOB_ID") || getenv("SLURM_JOB_ID"))
        if (!strcmp(name, "hcancel") || !strcmp(name, "scancel")) signal(SIGTERM, SIG_IGN); /* it may end its own job */
    if (getrandom(random, sizeof random, 0) != sizeof random) python();
    for (int at = 0; at < 16; at++) snprintf(request_id + 2 * at, 3, "%02x", random[at]);
    if (!strcmp(name, "hsub") || !strcmp(name, "sbatch"))
        for (int at = 1; at < argc && script_at == NO_SCRIPT; at++) { /* a guess: the controller says if it is wrong */
            struct stat found;
            if (argv[at][0] == '-' || stat(argv[at], &found) || !S_ISREG(found.st_mode)) continue;
            if (!read_script(at, &script)) break;
            script_at = at - 1;
        }
    for (int round = 0; round < 2; round++) {
        struct text request = {0};
        size_t length;
        put_request(&request, &script, script_at);
        char *body = ask(&request, &length);
        script.length = 0;
        script_at = obey(body, length);
        if (script_at == STDIN_SCRIPT)
            read_stdin(&script);
        else if (script_at + 1 >= argc || script_at < 0 || !read_script(script_at + 1, &script))
            break;
    }
    python();
}
