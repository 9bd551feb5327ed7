/* A disk that fails or is slow when a file says so, for a process that this library is loaded into
 * before all others. Each line of the file that FAILING_DISK names is
 *
 *     read|write|sync  end of the files' names  error number  microseconds before the call
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *kind, int fd)
{
    const char *rules = getenv("FAILING_DISK");
    char link[64], name[4096], line[4096];
    if (rules == NULL)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0 || name[0] != '/')
        return 0;
    name[length] = 0;
    FILE *file = fopen(rules, "re");
    int found = 0;
    if (file == NULL)
        return 0;
    while (!found && fgets(line, sizeof line, file)) {
        char what[16], end[256];
        int number, pause;
        if (sscanf(line, "%15s %255s %d %d", what, end, &number, &pause) != 4 || strcmp(what, kind))
            continue;
        size_t ends = strlen(end);
        if (ends > (size_t)length || strcmp(name + length - ends, end))
            continue;
        if (pause)
            usleep(pause);
        found = number;
    }
    fclose(file);
    errno = found;
    return found;
}

#define CALL(result, name, kind, parameters, arguments)                    \
    result name parameters                                                 \
    {                                                                      \
        static result (*next) parameters;                                  \
        if (next == NULL)                                                  \
            next = dlsym(RTLD_NEXT, #name);                                \
        return fails(kind, fd) ? -1 : next arguments;                      \
    }
#define VECTORS (int fd, const struct iovec *parts, int count, off_t at)
#define VECTORS2 (int fd, const struct iovec *parts, int count, off_t at, int flags)

CALL(ssize_t, pread, "read", (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
CALL(ssize_t, pread64, "read", (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
CALL(ssize_t, preadv, "read", VECTORS, (fd, parts, count, at))
CALL(ssize_t, preadv64, "read", VECTORS, (fd, parts, count, at))
CALL(ssize_t, preadv2, "read", VECTORS2, (fd, parts, count, at, flags))
CALL(ssize_t, preadv64v2, "read", VECTORS2, (fd, parts, count, at, flags))
CALL(ssize_t, pwrite, "write", (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
CALL(ssize_t, pwrite64, "write", (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
CALL(ssize_t, pwritev, "write", VECTORS, (fd, parts, count, at))
CALL(ssize_t, pwritev64, "write", VECTORS, (fd, parts, count, at))
CALL(ssize_t, pwritev2, "write", VECTORS2, (fd, parts, count, at, flags))
CALL(ssize_t, pwritev64v2, "write", VECTORS2, (fd, parts, count, at, flags))
CALL(int, fsync, "sync", (int fd), (fd))
CALL(int, fdatasync, "sync", (int fd), (fd))
