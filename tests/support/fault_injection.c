/* Preloaded library that lets system calls which write below a folder fail.

   fault_arm(folder, at, count, error): the calls numbered at, at + 1, ... (count of them, from 1) fail
   with errno error; error 0 writes half of the data, and is not applied to other calls.
   fault_calls(): calls below the folder since then. fault_disarm(): no call fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long first, last, calls;
static int failure, armed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fault_arm(const char *root, long at, long count, int error) {
  pthread_mutex_lock(&lock);
  snprintf(folder, sizeof folder, "%s", root);
  first = at, last = at + count - 1, calls = 0, failure = error, armed = 1;
  pthread_mutex_unlock(&lock);
}

void fault_disarm(void) { armed = 0; }
long fault_calls(void) { return calls; }

static int below(const char *path) {
  size_t length = strlen(folder);
  return path && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* 0: the call is made; 1: it fails; 2: half of the data is written. */
static int hit(const char *path, int writes) {
  int found = 0;
  if (!armed || !below(path)) return 0;
  pthread_mutex_lock(&lock);
  if (writes || failure) {
    calls++;
    if (calls >= first && calls <= last) found = failure ? 1 : 2;
  }
  pthread_mutex_unlock(&lock);
  if (found == 1) errno = failure;
  return found;
}

static int hit_descriptor(int fd, int writes) {
  char name[64], path[PATH_MAX];
  ssize_t length;
  if (!armed) return 0;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  length = readlink(name, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return hit(path, writes);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  int found = hit_descriptor(fd, size > 1);
  if (found == 1) return -1;
  return real(fd, data, found == 2 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  REAL(pwrite64);
  int found = hit_descriptor(fd, size > 1);
  if (found == 1) return -1;
  return real(fd, data, found == 2 ? size / 2 : size, at);
}

#define ON_DESCRIPTOR(name, declared, given)  \
  int name declared {                         \
    REAL(name);                               \
    return hit_descriptor(fd, 0) == 1 ? -1 : real given; \
  }
ON_DESCRIPTOR(fsync, (int fd), (fd))
ON_DESCRIPTOR(fdatasync, (int fd), (fd))
ON_DESCRIPTOR(ftruncate64, (int fd, off64_t size), (fd, size))

int posix_fallocate64(int fd, off64_t at, off64_t size) {
  REAL(posix_fallocate64);
  return hit_descriptor(fd, 0) == 1 ? failure : real(fd, at, size);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  return hit(to, 0) == 1 ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return hit(path, 0) == 1 ? -1 : real(path, mode);
}

int unlink(const char *path) {
  REAL(unlink);
  return hit(path, 0) == 1 ? -1 : real(path);
}

int rmdir(const char *path) {
  REAL(rmdir);
  return hit(path, 0) == 1 ? -1 : real(path);
}

static int opens(int flags) { return flags & (O_CREAT | O_WRONLY | O_RDWR); }

int open64(const char *path, int flags, ...) {
  REAL(open64);
  va_list more;
  va_start(more, flags);
  mode_t mode = va_arg(more, mode_t);
  va_end(more);
  return opens(flags) && hit(path, 0) == 1 ? -1 : real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
  REAL(open);
  va_list more;
  va_start(more, flags);
  mode_t mode = va_arg(more, mode_t);
  va_end(more);
  return opens(flags) && hit(path, 0) == 1 ? -1 : real(path, flags, mode);
}
