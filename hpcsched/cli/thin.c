/* hsub, hqueue, hcancel, sbatch, squeue and scancel as thin clients: hand words, script and environment to the controller,
 * and print what it answers. thin.py is the same where no compiler was; hpcsched/api/command.py has the answer's form.
 *
 * Knows no options and no formats. What it cannot do itself (no controller, a terminal to read from, text that is not UTF-8,
 * the answer "python", a gateway) the Python command does, which takes the place of this process and says what is wrong. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
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

enum { MAX_SCRIPT = 256 << 10, MAX_CONFIG = 1 << 20, MAX_ANSWER = 256 << 20, TIMEOUT_S = 60, STDIN_SCRIPT = -1, NO_SCRIPT = -2 };

struct text {
    char *bytes; /* with a NUL behind them */
    size_t length, room;
};

static char **words, request_id[33];
static const char *name;

static void put_bytes(struct text *to, const char *bytes, size_t length) {
    if (to->length + length >= to->room) to->bytes = realloc(to->bytes, to->room = 2 * (to->length + length) + 4096);
    if (!to->bytes) abort();
    memcpy(to->bytes + to->length, bytes, length);
    to->bytes[to->length += length] = 0;
}

static void put(struct text *to, const char *text) { put_bytes(to, text, strlen(text)); }

/* Execute the Python command in the place of this one: bin/hpcsched-command beside this program. */
static void python(void) {
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    path[length > 0 ? length : 0] = 0;
    if (!strchr(path, '/')) abort();
    strcpy(strrchr(path, '/'), "/hpcsched-command");
    words[0] = (char *)name;
    words[-1] = path;
    execv(path, words - 1);
    fprintf(stderr, "%s: error: cannot run %s: %s\n", name, path, strerror(errno));
    exit(1);
}

/* Return the length of the UTF-8 character at `s`, 0 if it is none that a text may have (Unicode, table 3-7). */
static size_t character(const unsigned char *s, const unsigned char *end) {
    if (*s < 0x80) return 1;
    size_t more = *s >= 0xC2 && *s <= 0xDF ? 1 : *s >= 0xE0 && *s <= 0xEF ? 2 : *s >= 0xF0 && *s <= 0xF4 ? 3 : 0;
    if (!more || (size_t)(end - s) <= more) return 0;
    for (size_t at = 1; at <= more; at++)
        if ((s[at] & 0xC0) != 0x80) return 0;
    if ((*s == 0xE0 && s[1] < 0xA0) || (*s == 0xED && s[1] > 0x9F) || (*s == 0xF0 && s[1] < 0x90) || (*s == 0xF4 && s[1] > 0x8F))
        return 0;
    return more + 1;
}

/* Append `key`, which is written as it is, and `value` as a JSON text. What is not UTF-8 is left to Python. */
static void put_text(struct text *to, const char *key, const char *value) {
    const unsigned char *s = (const unsigned char *)value, *end = s + strlen(value);
    char escaped[8];
    put(to, key);
    put(to, "\"");
    for (size_t size; s < end; s += size) {
        if (!(size = character(s, end))) python();
        snprintf(escaped, sizeof escaped, "\\u%04x", *s);
        if (*s == '"' || *s == '\\' || *s < 0x20)
            put(to, escaped);
        else
            put_bytes(to, (const char *)s, size);
    }
    put(to, "\"");
}

/* Append all of the file to `to`; return whether it could be read and has at most `most` bytes. */
static int read_all(int fd, struct text *to, size_t most) {
    char block[65536];
    ssize_t got;
    while ((got = read(fd, block, sizeof block)) > 0 && to->length <= most) put_bytes(to, block, (size_t)got);
    return got == 0 && to->length <= most;
}

/* Put into `to` the directory hpcsched of a kind (XDG Base Directory Specification); return whether there is one. */
static int xdg(char to[4096], const char *variable, const char *below_home) {
    const char *base = getenv(variable), *home = getenv("HOME");
    if (base && base[0] == '/') return snprintf(to, 4096, "%s/hpcsched", base) < 4096;
    return home && home[0] && snprintf(to, 4096, "%s/%s/hpcsched", home, below_home) < 4096;
}

/* Put into `to` where the controller listens, as hpcsched/paths.py says; return 0 where that takes more than is read here. */
static int find_socket(char *to, size_t room) {
    char own[4096] = "", state[4096], file[4200];
    struct text toml = {0};
    const char *form = "%s/state/run/api.sock", *config = "/etc/hpcsched", *system_file = "/etc/hpcsched/hpcsched.toml";
    const char *given = getenv("HPCSCHED_API"), *named = getenv("HPCSCHED_CONFIG"), *runtime = getenv("XDG_RUNTIME_DIR");
    if (given && given[0]) return (size_t)snprintf(to, room, "%s", given) < room;
    if (!xdg(own, "XDG_CONFIG_HOME", ".config") && getuid()) return 0;
    snprintf(file, sizeof file, "%s/hpcsched.toml", own);
    if (named && named[0])
        config = named;
    else if (getuid() && (!access(file, F_OK) || access(system_file, F_OK)))
        config = own;
    if (config[0] != '/' || snprintf(file, sizeof file, "%s/hpcsched.toml", config) >= (int)sizeof file) return 0;
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 ? !read_all(fd, &toml, MAX_CONFIG) : errno != ENOENT) return 0;
    put(&toml, "");
    for (char *line = strtok(toml.bytes, "\n"); line; line = strtok(NULL, "\n"))
        if (line[strspn(line, " \t")] != '#' && (strstr(line, "run_dir") || strstr(line, "state_dir")))
            return 0; /* TOML is for Python */
    if (!strcmp(config, "/etc/hpcsched"))
        form = "/run/hpcsched/api.sock%.0s";
    else if (!strcmp(config, own) && runtime && runtime[0] == '/')
        form = "%s/hpcsched/api.sock", config = runtime;
    else if (!strcmp(config, own) && (!xdg(state, "XDG_STATE_HOME", ".local/state") || (runtime && runtime[0])))
        return 0;
    else if (!strcmp(config, own))
        form = "%s/run/api.sock", config = state;
    return (size_t)snprintf(to, room, form, config) < room;
}

static void put_environment(struct text *to) {
    static const char *kinds[] = {"AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK"};
    static const int numbers[] = {RLIMIT_AS,      RLIMIT_CORE,   RLIMIT_CPU,   RLIMIT_DATA, RLIMIT_FSIZE,
                                  RLIMIT_MEMLOCK, RLIMIT_NOFILE, RLIMIT_NPROC, RLIMIT_RSS,  RLIMIT_STACK};
    char mask[32], noted[512] = "HPCSCHED_RLIMITS=";
    mode_t old = umask(077);
    umask(old);
    snprintf(mask, sizeof mask, "SLURM_UMASK=%04o", (unsigned)old);
    for (size_t at = 0, end = strlen(noted); at < sizeof numbers / sizeof *numbers; at++) {
        struct rlimit limit;
        getrlimit(numbers[at], &limit);
        end += (size_t)snprintf(noted + end, sizeof noted - end, "%s%s=%lld", at ? "," : "", kinds[at], (long long)limit.rlim_cur);
    }
    put_text(to, "", mask); /* of two of one name the first counts */
    put_text(to, ",", noted);
    for (char **one = environ; *one; one++) put_text(to, ",", *one);
}

/* Append the file that is the word at `at` to `script`; return whether it can be sent. */
static int read_script(int at, struct text *script) {
    struct stat found;
    int fd = open(words[at], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return 0;
    int sent = !fstat(fd, &found) && S_ISREG(found.st_mode) && read_all(fd, script, MAX_SCRIPT);
    close(fd);
    return sent;
}

/* Read the script from standard input, which is put back for Python. */
static void read_stdin(struct text *script) {
    int again = memfd_create("stdin", 0);
    if (isatty(0) || again < 0) python();
    int whole = read_all(0, script, 17 * MAX_SCRIPT); /* Python refuses a longer one */
    put(script, "");
    if (write(again, script->bytes, script->length) != (ssize_t)script->length || lseek(again, 0, SEEK_SET)) abort();
    dup2(again, 0);
    if (!whole || script->length > MAX_SCRIPT) python();
}

static void put_request(struct text *to, const struct text *script, int script_at) {
    char directory[4096], numbers[200];
    struct utsname host;
    struct winsize window;
    struct text body = {0};
    struct tm local, *in_zone = localtime_r(&(time_t){time(NULL)}, &local);
    if (!getcwd(directory, sizeof directory) || uname(&host) || !in_zone) python();
    put_text(&body, "{\"command\":", name);
    put(&body, ",\"argv\":[");
    for (char **word = words + 1; *word; word++) put_text(&body, word == words + 1 ? "" : ",", *word);
    put(&body, "],\"environ\":[");
    put_environment(&body);
    put_text(&body, "],\"work_dir\":", directory);
    put_text(&body, ",\"host\":", host.nodename);
    put_text(&body, ",\"request_id\":", request_id);
    if (script_at != NO_SCRIPT) {
        if (strlen(script->bytes) != script->length) python(); /* a NUL: it is a program */
        put_text(&body, ",\"script\":", script->bytes);
        snprintf(numbers, sizeof numbers, ",\"script_at\":%d", script_at);
        put(&body, numbers);
    }
    int columns = ioctl(1, TIOCGWINSZ, &window) ? 0 : window.ws_col;
    snprintf(numbers, sizeof numbers, ",\"width\":%d,\"out_is_terminal\":%s,\"err_is_terminal\":%s,\"utc_offset_s\":%ld}", columns,
             isatty(1) ? "true" : "false", isatty(2) ? "true" : "false", local.tm_gmtoff);
    put(&body, numbers);
    snprintf(numbers, sizeof numbers,
             "POST /v1/command HTTP/1.1\r\nHost: hpcsched\r\nContent-Type: application/json\r\nConnection: close\r\n"
             "Content-Length: %zu\r\n\r\n", body.length);
    put(to, numbers);
    put_bytes(to, body.bytes, body.length);
}

/* Return whether only root could have made the socket's directory as one of `uid`. Links are left to Python: is_made_by of
 * hpcnode/os/trust.py. */
static int given_by_root(const char *where, uid_t uid) {
    char path[PATH_MAX];
    struct stat found;
    if (!realpath(where, path) || strcmp(where, path)) return 0;
    *strrchr(path, '/') = 0;
    if (lstat(path, &found) || found.st_uid != uid || (found.st_mode & 022)) return 0;
    for (mode_t excused = 0; *path; excused = S_ISVTX) {
        *strrchr(path, '/') = 0;
        if (lstat(*path ? path : "/", &found) || found.st_uid || ((found.st_mode & 022) && !(found.st_mode & excused))) return 0;
    }
    return 1;
}

/* Return a connection to the controller, which must be root, ourselves, or the account that root gave the directory. */
static int connected(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer;
    struct timeval patience = {.tv_sec = TIMEOUT_S};
    socklen_t size = sizeof peer;
    if (!find_socket(address.sun_path, sizeof address.sun_path)) python();
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience)) python();
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) python();
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size)) python();
    if (peer.uid != 0 && peer.uid != getuid() && !given_by_root(address.sun_path, peer.uid)) python();
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return fd;
}

/* The request may have taken effect. A submission is repeated under its id, a look at the queue as well. */
static void lost(void) {
    setenv("HPCSCHED_REQUEST_ID", request_id, 1);
    if (!strstr(name, "cancel")) python();
    if (name[0] == 's') fprintf(stderr, "scancel: error: Kill job error: Unable to contact slurm controller (connect failure)\n");
    fprintf(stderr, "%s: error: lost the connection to the hpcsched controller before it answered\n", name);
    exit(1);
}

/* Send the request; return the body of the answer. */
static char *ask(const struct text *request, size_t *length) {
    struct text answer = {0};
    int fd = connected();
    ssize_t wrote = 1; /* if it does not take all, it may have said why */
    for (size_t sent = 0; sent < request->length && wrote > 0; sent += wrote > 0 ? (size_t)wrote : 0)
        wrote = send(fd, request->bytes + sent, request->length - sent, MSG_NOSIGNAL);
    read_all(fd, &answer, MAX_ANSWER);
    close(fd);
    put(&answer, "");
    char *body = strstr(answer.bytes, "\r\n\r\n"), *size = strstr(answer.bytes, "\r\nContent-Length: ");
    if (!body || !size) lost();
    if (strncmp(answer.bytes, "HTTP/1.1 200 ", 13)) python(); /* nothing was done */
    *length = strtoul(size + 18, NULL, 10);
    body += 4;
    if (*length > (size_t)(answer.bytes + answer.length - body)) lost();
    return body;
}

/* Print the answer, and exit; return the place of the script if the controller wants it. */
static int obey(char *body, size_t length) {
    for (char *at = body, *end = body + length; at < end;) {
        char *line = at, *rest;
        if (!(at = memchr(at, '\n', (size_t)(end - at)))) break;
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
    words = (char **)calloc((size_t)argc + 2, sizeof *argv) + 1; /* a place before them is for Python */
    memcpy(words, argv, (size_t)argc * sizeof *argv);
    name = slash ? slash + 1 : argv[0];
    signal(SIGPIPE, SIG_IGN);
    if (strstr(name, "cancel") && (getenv("HPCSCHED_JOB_ID") || getenv("SLURM_JOB_ID")))
        signal(SIGTERM, SIG_IGN); /* it may end its own job */
    if (getenv("HPCSCHED_URL") && *getenv("HPCSCHED_URL")) python(); /* TLS is for Python */
    if (getrandom(random, sizeof random, 0) != sizeof random) python();
    for (int at = 0; at < 16; at++) snprintf(request_id + 2 * at, 3, "%02x", random[at]);
    if (strstr(name, "sub") || strstr(name, "batch"))
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
        script = (struct text){0}, script_at = obey(body, length);
        if (script_at == STDIN_SCRIPT)
            read_stdin(&script);
        else if (script_at + 1 >= argc || script_at < 0 || !read_script(script_at + 1, &script))
            break;
    }
    python();
}
