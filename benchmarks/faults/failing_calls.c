/* Failing calls: an LD_PRELOAD library in which calls on files below a folder fail with an error of the disk.

   The file FAULT_CONTROL holds the struct below, mapped by the campaign and by the process. Calls of the chosen kinds are
   counted; from the `first` to the `last` one they fail with `error`. FAULT_UNDER is a part of the paths concerned. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SYNC = 1, WRITE = 2, RENAME = 4, CREATE = 8, FOLDER = 16 };
struct control { int32_t armed, kinds, error, first, last, count, failed; };
static volatile struct control *control;

__attribute__((constructor)) static void begin(void) {
  const char *name = getenv("FAULT_CONTROL");
  int file = name ? open(name, O_RDWR) : -1;
  if (file < 0) return;
  void *mapped = mmap(0, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  control = mapped == MAP_FAILED ? 0 : mapped;
  close(file);
}

static int fails(int kind, const char *path) {
  if (!control || !control->armed || !(control->kinds & kind)) return 0;
  if (!strstr(path, getenv("FAULT_UNDER"))) return 0;
  int32_t number = __sync_add_and_fetch(&control->count, 1);
  if (number < control->first || number > control->last) return 0;
  __sync_add_and_fetch(&control->failed, 1);
  errno = control->error;
  return 1;
}

static int fails_at(int kind, int folder, const char *path) {
  char link[64], full[8192];
  if (path && (path[0] == '/' || folder == AT_FDCWD)) return fails(kind, path);
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t length = readlink(link, full, 4095);
  if (length < 0) return 0;
  full[length] = 0;
  if (path) { strcat(full, "/"); strncat(full, path, 4000); }
  return fails(kind, full);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FILE(kind, name, parameters, arguments) \
  ssize_t name parameters { return fails_at(kind, file, 0) ? -1 : REAL(name) arguments; }

int fsync(int file) { return fails_at(SYNC, file, 0) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails_at(SYNC, file, 0) ? -1 : REAL(fdatasync)(file); }
int syncfs(int file) { return fails_at(SYNC, file, 0) ? -1 : REAL(syncfs)(file); }
ON_FILE(WRITE, write, (int file, const void *data, size_t size), (file, data, size))
ON_FILE(WRITE, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
ON_FILE(WRITE, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(WRITE, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(WRITE, pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
ON_FILE(WRITE, pwritev64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
int rename(const char *from, const char *to) {
  return fails_at(RENAME, AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}
int renameat(int one, const char *from, int two, const char *to) {
  return fails_at(RENAME, two, to) ? -1 : REAL(renameat)(one, from, two, to);
}
int renameat2(int one, const char *from, int two, const char *to, unsigned flags) {
  return fails_at(RENAME, two, to) ? -1 : REAL(renameat2)(one, from, two, to, flags);
}
int link(const char *from, const char *to) {
  return fails_at(RENAME, AT_FDCWD, to) ? -1 : REAL(link)(from, to);
}
int linkat(int one, const char *from, int two, const char *to, int flags) {
  return fails_at(RENAME, two, to) ? -1 : REAL(linkat)(one, from, two, to, flags);
}
int mkdir(const char *path, mode_t mode) {
  return fails_at(FOLDER, AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
  return fails_at(FOLDER, folder, path) ? -1 : REAL(mkdirat)(folder, path, mode);
}

#define OPENED(folder, path, call) \
  va_list rest; \
  va_start(rest, flags); \
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
  va_end(rest); \
  if ((flags & O_CREAT) && fails_at(CREATE, folder, path)) return -1; \
  return call;
int open(const char *path, int flags, ...) { OPENED(AT_FDCWD, path, REAL(open)(path, flags, mode)) }
int open64(const char *path, int flags, ...) { OPENED(AT_FDCWD, path, REAL(open64)(path, flags, mode)) }
int openat(int folder, const char *path, int flags, ...) {
  OPENED(folder, path, REAL(openat)(folder, path, flags, mode))
}
int openat64(int folder, const char *path, int flags, ...) {
  OPENED(folder, path, REAL(openat64)(folder, path, flags, mode))
}
