/* Preloaded into a process, lets its steps on disk below one folder fail, tear, or be its last.

   Steps are what changes a file or makes a change durable: writes, truncations, renames, links, removals and syncs, by
   whichever library (Python, SQLite, safetensors). Faults come one after the other: each counts steps from the one
   before it. What happened is told in a log, a line of JSON each. Until `fault_begin` is called nothing is counted. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { KILL, POWER, FULL, READ_ONLY, IO, CLOCK };
enum place { DISK, RPC };
/* Which errors a step can meet. */
enum { CAN_FULL = 1 << FULL, CAN_READ_ONLY = 1 << READ_ONLY, CAN_IO = 1 << IO };

struct fault {
    char name[64];
    enum kind kind;
    enum place place;
    long step;
    int after;
    char where[64]; /* only steps on paths that hold this are counted */
    double seconds; /* how long an error lasts, 0: this step only; how far the clock jumps */
};

#define MOST 256
static struct fault faults[MOST];
static int count, current, power;
static volatile int happened;
static long left_to_count;
static char folder[PATH_MAX];
static int log_file = -1;
static int error_number, error_kind;
static double error_until;
static volatile double shift, shift_until;
#define SHIFTED_SECONDS 5 /* after which the clock is put right */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

static double monotonic(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + now.tv_nsec / 1e9;
}

static int below(const char *path) {
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int place_of(int file, char *path) {
    struct stat found;
    char link[64];
    if (fstat(file, &found) || !(S_ISREG(found.st_mode) || S_ISDIR(found.st_mode))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int place_of_name(const char *name, char *path) {
    char parent[PATH_MAX];
    if (name == NULL || strlen(name) >= PATH_MAX) return 0;
    strcpy(parent, name);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    if (!realpath(slash ? (slash == parent ? "/" : parent) : ".", path)) return 0;
    if (strlen(path) + strlen(name) + 2 >= PATH_MAX) return 0;
    strcat(path, "/");
    strcat(path, slash ? slash + 1 : name);
    return below(path);
}

/* What a power cut takes: bytes that no sync has reached, and renames of which no sync of the folder has told. */
static struct { dev_t device; ino_t inode; int file; off_t synced; } written[MOST];
static struct { char from[PATH_MAX], to[PATH_MAX], kept[PATH_MAX + 64]; } renamed[MOST];
static int writtens, renames;

static void note_write(int file) {
    struct stat found;
    if (!power || writtens == MOST || fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    for (int i = 0; i < writtens; i++)
        if (written[i].inode == found.st_ino && written[i].device == found.st_dev) return;
    written[writtens].device = found.st_dev;
    written[writtens].inode = found.st_ino;
    written[writtens].file = fcntl(file, F_DUPFD_CLOEXEC, 100);
    written[writtens].synced = found.st_size;
    if (written[writtens].file >= 0) writtens++;
}

static void note_sync(int file, const char *path) {
    struct stat found;
    if (!power || fstat(file, &found)) return;
    for (int i = 0; i < writtens; i++)
        if (written[i].inode == found.st_ino && written[i].device == found.st_dev) written[i].synced = found.st_size;
    if (!S_ISDIR(found.st_mode)) return;
    int kept = 0;
    for (int i = 0; i < renames; i++) {
        char *slash = strrchr(renamed[i].to, '/');
        int same = slash && strlen(path) == (size_t)(slash - renamed[i].to)
                   && strncmp(path, renamed[i].to, slash - renamed[i].to) == 0;
        if (same) {
            if (renamed[i].kept[0]) syscall(SYS_unlinkat, AT_FDCWD, renamed[i].kept, 0);
        } else {
            renamed[kept++] = renamed[i];
        }
    }
    renames = kept;
}

static void note_rename(const char *from, const char *to) {
    static int number;
    if (!power || renames == MOST) return;
    strcpy(renamed[renames].from, from);
    strcpy(renamed[renames].to, to);
    snprintf(renamed[renames].kept, sizeof renamed[renames].kept, "%s.kept-%d-%d", folder, getpid(), number++);
    if (syscall(SYS_linkat, AT_FDCWD, to, AT_FDCWD, renamed[renames].kept, 0)) renamed[renames].kept[0] = 0;
    renames++;
}

static void lose_power(void) {
    for (int i = renames - 1; i >= 0; i--) {
        if (syscall(SYS_renameat, AT_FDCWD, renamed[i].to, AT_FDCWD, renamed[i].from)) break;
        if (renamed[i].kept[0]) syscall(SYS_renameat, AT_FDCWD, renamed[i].kept, AT_FDCWD, renamed[i].to);
    }
    for (int i = 0; i < writtens; i++) {
        struct stat found;
        if (fstat(written[i].file, &found) || found.st_size <= written[i].synced) continue;
        /* Of what was not synced nothing, a part or all may have reached the disk. */
        off_t part = (found.st_size - written[i].synced) * ((faults[current].step + i) % 4) / 3;
        syscall(SYS_ftruncate, written[i].file, written[i].synced + part);
    }
}

static void say(const char *step, const char *path) {
    char line[PATH_MAX + 256];
    int length = snprintf(line, sizeof line, "{\"fault\": \"%s\", \"step\": \"%s\", \"path\": \"%s\", \"at\": %.6f}\n",
                          faults[current].name, step, path, monotonic());
    if (syscall(SYS_write, log_file, line, length) != length) abort();
}

static void happen(const char *step, const char *path) {
    struct fault *fault = &faults[current];
    say(step, path);
    switch (fault->kind) {
    case POWER:
        lose_power(); /* falls through */
    case KILL:
        kill(getpid(), SIGKILL);
        pause();
        break;
    case CLOCK:
        shift = fault->seconds;
        shift_until = monotonic() + SHIFTED_SECONDS;
        break;
    default:
        error_kind = fault->kind;
        error_number = fault->kind == FULL ? ENOSPC : fault->kind == READ_ONLY ? EROFS : EIO;
        error_until = monotonic() + fault->seconds;
    }
    happened++;
    current++;
    left_to_count = current < count ? faults[current].step : 0;
}

/* The error that something meets which is no step itself. */
static int in_force(int can) {
    int found = 0;
    pthread_mutex_lock(&lock);
    if (error_until > 0 && monotonic() < error_until && can & 1 << error_kind) found = error_number;
    pthread_mutex_unlock(&lock);
    if (found) errno = found;
    return found;
}

/* Counts a step that is about to be taken; returns the error that it meets. `*due`: a fault comes after it. */
static int before(const char *step, const char *path, int can, int *due) {
    int found = 0;
    *due = 0;
    if (log_file < 0) return 0;
    pthread_mutex_lock(&lock);
    if (error_until > 0) {
        if (monotonic() >= error_until) error_until = 0;
        else if (can & 1 << error_kind) found = error_number;
    }
    if (!found && error_until == 0 && current < count && faults[current].place == DISK
        && strstr(path, faults[current].where)) {
        struct fault *fault = &faults[current];
        int error = fault->kind == FULL || fault->kind == READ_ONLY || fault->kind == IO;
        if (--left_to_count <= 0) {
            if (!error && fault->after) *due = 1;
            else if (!error) happen(step, path);
            else if (can & 1 << fault->kind) {
                happen(step, path);
                found = error_number;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    if (found) errno = found;
    return found;
}

static void after(const char *step, const char *path, int due) {
    if (!due) return;
    int kept = errno;
    pthread_mutex_lock(&lock);
    if (current < count) happen(step, path);
    pthread_mutex_unlock(&lock);
    errno = kept;
}

void fault_add(const char *name, int kind, int place, long step, int afterwards, double seconds,
               const char *where) {
    if (count == MOST) abort();
    struct fault *fault = &faults[count++];
    snprintf(fault->name, sizeof fault->name, "%s", name);
    fault->kind = kind;
    fault->place = place;
    fault->step = step;
    fault->after = afterwards;
    fault->seconds = seconds;
    snprintf(fault->where, sizeof fault->where, "%s", where);
    if (kind == POWER) power = 1;
}

void fault_begin(const char *where, const char *log) {
    snprintf(folder, sizeof folder, "%s", where);
    left_to_count = count ? faults[0].step : 0;
    log_file = fcntl(open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600), F_DUPFD_CLOEXEC, 100);
}

/* A boundary of a call: something is about to be, or was, recorded, sent, received or answered. */
void fault_rpc(const char *what, int afterwards) {
    pthread_mutex_lock(&lock);
    if (log_file >= 0 && current < count && faults[current].place == RPC && faults[current].after == afterwards
        && (error_until == 0 || monotonic() >= error_until)) {
        error_until = 0;
        if (--left_to_count <= 0) happen(what, "");
    }
    pthread_mutex_unlock(&lock);
}

/* How many faults have happened in this process; a process that was killed is not asked. */
int fault_count(void) {
    return happened;
}

#define STEP_ON_FILE(step, can, call, failed)                     \
    char path[PATH_MAX];                                          \
    int due = 0, inside = log_file >= 0 && place_of(file, path);  \
    if (inside && before(step, path, can, &due)) return failed;   \
    if (inside) { pthread_mutex_lock(&lock); note_write(file); pthread_mutex_unlock(&lock); } \
    __typeof__(call) result = call;                               \
    if (inside) after(step, path, due);                           \
    return result;

ssize_t write(int file, const void *data, size_t length) {
    STEP_ON_FILE("write", CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(write)(file, data, length), -1)
}
ssize_t pwrite(int file, const void *data, size_t length, off_t offset) {
    STEP_ON_FILE("write", CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(pwrite)(file, data, length, offset), -1)
}
ssize_t pwrite64(int file, const void *data, size_t length, off64_t offset) {
    STEP_ON_FILE("write", CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(pwrite64)(file, data, length, offset), -1)
}
ssize_t writev(int file, const struct iovec *data, int parts) {
    STEP_ON_FILE("write", CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(writev)(file, data, parts), -1)
}
int ftruncate(int file, off_t length) {
    STEP_ON_FILE("truncate", CAN_READ_ONLY | CAN_IO, REAL(ftruncate)(file, length), -1)
}
int ftruncate64(int file, off64_t length) {
    STEP_ON_FILE("truncate", CAN_READ_ONLY | CAN_IO, REAL(ftruncate64)(file, length), -1)
}

#define SYNC(call)                                                 \
    char path[PATH_MAX];                                           \
    int due = 0, inside = log_file >= 0 && place_of(file, path);   \
    if (inside && before("sync", path, CAN_FULL | CAN_IO, &due)) return -1; \
    int result = call;                                             \
    if (inside && result == 0) { pthread_mutex_lock(&lock); note_sync(file, path); pthread_mutex_unlock(&lock); } \
    if (inside) after("sync", path, due);                          \
    return result;

int fsync(int file) {
    SYNC(REAL(fsync)(file))
}
int fdatasync(int file) {
    SYNC(REAL(fdatasync)(file))
}

#define STEP_ON_NAME(step, name, can, call)                             \
    char path[PATH_MAX];                                                \
    int due = 0, inside = log_file >= 0 && place_of_name(name, path);   \
    if (inside && before(step, path, can, &due)) return -1;             \
    int result = call;                                                  \
    if (inside) after(step, path, due);                                 \
    return result;

int truncate(const char *name, off_t length) {
    STEP_ON_NAME("truncate", name, CAN_READ_ONLY | CAN_IO, REAL(truncate)(name, length))
}
int truncate64(const char *name, off64_t length) {
    STEP_ON_NAME("truncate", name, CAN_READ_ONLY | CAN_IO, REAL(truncate64)(name, length))
}
int unlink(const char *name) {
    STEP_ON_NAME("remove", name, CAN_READ_ONLY | CAN_IO, REAL(unlink)(name))
}
int link(const char *from, const char *to) {
    STEP_ON_NAME("link", to, CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(link)(from, to))
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    STEP_ON_NAME("link", to, CAN_FULL | CAN_READ_ONLY | CAN_IO, REAL(linkat)(a, from, b, to, flags))
}
int rename(const char *from, const char *to) {
    char path[PATH_MAX], source[PATH_MAX];
    int due = 0, inside = log_file >= 0 && place_of_name(to, path) && place_of_name(from, source);
    if (inside && before("rename", path, CAN_READ_ONLY | CAN_IO, &due)) return -1;
    if (inside) { pthread_mutex_lock(&lock); note_rename(source, path); pthread_mutex_unlock(&lock); }
    int result = REAL(rename)(from, to);
    if (inside) after("rename", path, due);
    return result;
}

/* Opening and making folders are no steps, but they meet the errors that are in force. */
#define OPEN(name_of_call)                                                       \
    int mode = 0;                                                                \
    char path[PATH_MAX];                                                         \
    va_list rest;                                                                \
    va_start(rest, flags);                                                       \
    if (flags & (O_CREAT | __O_TMPFILE)) mode = va_arg(rest, int);               \
    va_end(rest);                                                                \
    if (log_file >= 0 && error_until > 0 && flags & (O_WRONLY | O_RDWR) && place_of_name(name, path)) { \
        int can = CAN_READ_ONLY | (access(path, F_OK) ? CAN_FULL | CAN_IO : 0);  \
        if (in_force(can)) return -1;                                            \
    }

int open(const char *name, int flags, ...) {
    OPEN(open)
    return REAL(open)(name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    OPEN(open64)
    return REAL(open64)(name, flags, mode);
}
int openat(int at, const char *name, int flags, ...) {
    OPEN(openat)
    return REAL(openat)(at, name, flags, mode);
}
int openat64(int at, const char *name, int flags, ...) {
    OPEN(openat64)
    return REAL(openat64)(at, name, flags, mode);
}
int mkdir(const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (log_file >= 0 && error_until > 0 && place_of_name(name, path) && in_force(CAN_FULL | CAN_READ_ONLY | CAN_IO))
        return -1;
    return REAL(mkdir)(name, mode);
}

/* The clock jumps for Python's own code. Not for gRPC and glibc, which hand times on to the kernel: its clock has not
   jumped, and they would wait for hours. */
static int asked_by_python(void *caller) {
    Dl_info found;
    return dladdr(caller, &found) && found.dli_fname && strstr(found.dli_fname, "python") && !strstr(found.dli_fname, "site-packages");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (shift != 0 && clock == CLOCK_REALTIME && result == 0 && monotonic() < shift_until
        && asked_by_python(__builtin_return_address(0)))
        now->tv_sec += (time_t)shift;
    return result;
}
