/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts nvhook's hot entries: `nvhook-prestart ARG…` becomes
 *
 *     PYTHON -I -S -B ENTRY prestart ARG…
 *
 * in an environment that nobody outside chose. It is linked statically: with a dynamic loader in between, an
 * image's LD_PRELOAD would have run before the first line below (CVE-2025-23266), and Python reads variables
 * of its own. -I and -S keep the working directory, the user's folders and .pth files off sys.path; -B keeps
 * root from writing byte code beside files that a package manager owns.
 *
 * As `nvhook-runtime` it becomes the low-level runtime, whose path stands in a file, for every verb but create and
 * run: a pod's exec probe each second must not pay for Python. Else Python decides; it gets the caller's environment,
 * which the runtime must see, in an anonymous file. No new privileges must stay off: the container would inherit it.
 *
 * The two paths are written into the installed copy over the marks below (hook/install.py), or compiled in
 * by a package. A copy with a mark still in it refuses, under every name: a path that is not absolute would be looked
 * up in the working directory, which is the image's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 256, ARGUMENTS_MAX = 1024 };

#ifdef PYTHON
static const char python[PATH_BYTES] = PYTHON;
static const char entry[PATH_BYTES] = ENTRY;
#else
/* Not const, or the compiler would fold the marks into the comparisons below. */
__attribute__((used)) static char python[PATH_BYTES] = "@PYTHON@";
__attribute__((used)) static char entry[PATH_BYTES] = "@ENTRY@";
#endif

/* What may come in from outside. The rootless state folder is trusted by owner and mode, never by name. */
static const char *const allowed[] = {"XDG_RUNTIME_DIR"};

static const char prefix[] = "nvhook-";

/* NVIDIA's names, which CDI files of theirs start; the name is the verb. */
static const char *const nvidias[] = {"nvidia-cdi-hook", "nvidia-ctk", "nvidia-container-runtime-hook",
                                      "nvidia-container-toolkit"};

/* C.UTF-8 rather than C or nothing: those switch Python to its UTF-8 mode and make it set LC_CTYPE. */
static char locale[] = "LC_ALL=C.UTF-8";
static char path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/* With `.cdi` or `.legacy` behind them, as NVIDIA's, they force a mode. */
static const char *const runtimes[] = {"nvhook-runtime", "nvidia-container-runtime", NULL};
static const char state[] = "/run/nvhook/runtime.";

/* Our own global option, which the low-level runtime must not see: the folder that stands for the host's /. */
static const char host_root[] = "host-root";

/* Global options of runc (1.0 to 1.4) and crun (1.8 to 1.24), those that take a value and those that do not. */
static const char *const valued[] = {"log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager", NULL};
static const char *const plain[] = {"debug", "systemd-cgroup", "help", "h", "version", "v", NULL};

static void say(const char *text)
{
    /* Nothing can be done about a closed stderr; the exit status says it too. */
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static int fail(const char *what, const char *detail, const char *remedy)
{
    say("nvhook: error: ");
    say(what);
    say(detail);
    say("\n  remedy: ");
    say(remedy);
    say("\n");
    return 1;
}

static const char *base_name(const char *name)
{
    const char *slash = strrchr(name, '/');

    return slash ? slash + 1 : name;
}

/* The verb that a name stands for, NULL for none. */
static const char *verb_of(const char *name)
{
    for (size_t i = 0; i < sizeof nvidias / sizeof *nvidias; i++)
        if (strcmp(name, nvidias[i]) == 0)
            return name;
    return strncmp(name, prefix, sizeof prefix - 1) == 0 ? name + sizeof prefix - 1 : NULL;
}

static void fill_environment(char **to, char *const *from)
{
    size_t count = 0;

    to[count++] = locale;
    to[count++] = path;
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
        size_t length = strlen(allowed[i]);
        for (char *const *have = from; *have; have++) {
            if (strncmp(*have, allowed[i], length) == 0 && (*have)[length] == '=') {
                to[count++] = *have;
                break;
            }
        }
    }
    to[count] = NULL;
}

/* Whether a list has the text that ends where one of `ends` begins. */
static int has(const char *const *list, const char *text, const char *ends)
{
    size_t length = strcspn(text, ends);

    for (; *list; list++)
        if (strlen(*list) == length && strncmp(*list, text, length) == 0)
            return 1;
    return 0;
}

/* The runtime's verb, "" where there is none, NULL where only Python can tell. `words` become argv without our own
 * option, whose value `top` becomes. */
static const char *find_verb(int argc, char **argv, char **words, const char **top)
{
    const char *verb = "";
    int i = 1;

    *words++ = argv[0];
    for (; i < argc; i++) {
        const char *word = argv[i];

        if (*word != '-') {
            verb = word;
            break;
        }
        word += word[1] == '-' ? 2 : 1;
        if (strcmp(word, host_root) == 0 && i + 1 < argc) {
            *top = argv[++i];
            continue;
        }
        if (strncmp(word, host_root, sizeof host_root - 1) == 0 && word[sizeof host_root - 1] == '=') {
            *top = word + sizeof host_root;
            continue;
        }
        *words++ = argv[i];
        if (has(valued, word, "") && i + 1 < argc)
            *words++ = argv[++i];
        else if (!has(valued, word, "=") && !has(plain, word, "="))
            return NULL;
    }
    while (i < argc)
        *words++ = argv[i++];
    *words = NULL;
    return verb;
}

/* Become the low-level runtime; return where the file that names it, below `top`, is absent or unsound. */
static void pass_through(const char *name, const char *top, char **argv, char **environment)
{
    static char runtime[4096], file[4096];
    struct stat status;
    ssize_t size = 0;
    int fd;

    if (*top != '/' || snprintf(file, sizeof file, "%s%s%s", top, state, name) >= (int)sizeof file)
        return;
    fd = open(file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == 0 && !(status.st_mode & 022))
        size = read(fd, runtime, sizeof runtime);
    close(fd);
    if (size < 2 || *runtime != '/' || memchr(runtime, '\n', size) != runtime + size - 1)
        return;
    runtime[size - 1] = '\0';
    argv[0] = runtime;
    execve(runtime, argv, environment);
}

/* `DESCRIPTOR:SIGNALS` for Python: a file with the environment, and which of the signals that Python ignores were
 * ignored already. NULL if there is no such file to be had. */
static char *hand_over(char *const *environment)
{
    static const int ignored_by_python[] = {SIGPIPE, SIGXFSZ};
    static char word[32];
    struct sigaction action;
    int fd = memfd_create("environment", 0), signals = 0;

    for (; fd >= 0 && *environment; environment++) {
        ssize_t size = strlen(*environment) + 1;
        if (write(fd, *environment, size) != size)
            return NULL;
    }
    for (int i = 0; i < 2; i++)
        if (sigaction(ignored_by_python[i], NULL, &action) == 0 && action.sa_handler == SIG_IGN)
            signals |= 1 << i;
    snprintf(word, sizeof word, "%d:%d", fd, signals);
    return fd < 0 ? NULL : word;
}

/* Become the low-level runtime, or Python, which edits a container's configuration before it becomes that. */
static int run_runtime(const char *name, int argc, char **argv, char **environment)
{
    char **arguments = calloc(argc + 9, sizeof *arguments);
    char *clean[3 + sizeof allowed / sizeof *allowed], *handed;
    const char *top = "/", *verb = arguments ? find_verb(argc, argv, arguments, &top) : NULL;
    int count = 0;

    if (verb && strcmp(verb, "create") != 0 && strcmp(verb, "run") != 0)
        pass_through(name, top, arguments, environment);
    handed = hand_over(environment);
    if (!handed || !arguments)
        return fail("cannot keep the caller's environment: ", strerror(errno), "free memory on the host");
    arguments[count++] = (char *)python;
    arguments[count++] = "-I";
    arguments[count++] = "-S";
    arguments[count++] = "-B";
    arguments[count++] = (char *)entry;
    arguments[count++] = "runtime";
    arguments[count++] = (char *)name;
    arguments[count++] = handed;
    for (int i = 1; i < argc; i++)
        arguments[count++] = argv[i];
    fill_environment(clean, environment);
    execve(python, arguments, clean);
    return fail("cannot start ", python, "run `nvhook install` again");
}

/* `nvidia-ctk` is a person's command, but `nvidia-ctk hook` stands in CDI files of NVIDIA's older releases. */
static int is_command(const char *name, char *const *words)
{
    if (strcmp(name, "nvidia-ctk") != 0)
        return 0;
    while (*words && strcmp(*words, "hook") != 0)
        words++;
    return !*words;
}

/* Become the program `ctk` beside the entry, with all that the person set. */
static int run_command(char **argv, char **environment)
{
    static char program[PATH_BYTES + 4];

    memcpy(program, entry, PATH_BYTES);
    strcpy(program + (base_name(program) - program), "ctk");
    execve(program, argv, environment);
    return fail("cannot start ", program, "install the package with NVIDIA's names");
}

int main(int argc, char **argv, char **environment)
{
    static char *arguments[ARGUMENTS_MAX + 8];
    char *clean[3 + sizeof allowed / sizeof *allowed];
    const char *name = base_name(argc > 0 ? argv[0] : "");
    int count = 0;

    if (*(volatile char *)python != '/' || *(volatile char *)entry != '/')
        return fail("this launcher is not installed: no interpreter is written into it", "",
                    "run `nvhook install`, or install the nvhook package");
    if (has(runtimes, name, "."))
        return run_runtime(name, argc, argv, environment);
    if (is_command(name, argv + (argc > 0)))
        return run_command(argv, environment);
    if (!verb_of(name))
        return fail("started under a name that is no hook: ", name,
                    "let the hook's args[0] be the launcher's own name, such as nvhook-prestart");
    if (argc > ARGUMENTS_MAX)
        return fail("more than 1024 arguments", "", "call the hook with the arguments of its registration");
    arguments[count++] = (char *)python;
    arguments[count++] = "-I";
    arguments[count++] = "-S";
    arguments[count++] = "-B";
    arguments[count++] = (char *)entry;
    arguments[count++] = (char *)verb_of(name);
    for (int i = 1; i < argc; i++)
        arguments[count++] = argv[i];
    fill_environment(clean, environment);
    execve(python, arguments, clean);
    return fail("cannot start ", python, errno == ENOENT ? "the interpreter is gone: run `nvhook install` again"
                                                         : "check the interpreter's permissions");
}
