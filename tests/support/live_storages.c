/* Preloaded library that counts the bytes of torch's tensors on the CPU, in all threads.

   Torch's allocator (libc10) gets every storage by posix_memalign, with the alignment of 64 bytes.
   storage_live(): bytes that are allocated now. storage_peak(): the most since storage_reset(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 20)
static struct { void *at; size_t size; } known[SLOTS];
static size_t live, most;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*free_next)(void *);
static int (*align_next)(void **, size_t, size_t);

size_t storage_live(void) { return live; }
size_t storage_peak(void) { return most; }
void storage_reset(void) { most = live; }

static unsigned place(void *at) { return (unsigned)(((uintptr_t)at >> 6) * 2654435761u) % SLOTS; }

static int from_torch(void *caller) {
  static __thread void *last;
  static __thread int found;
  Dl_info info;
  if (caller != last) {
    last = caller;
    found = dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10.so");
  }
  return found;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  if (!align_next) align_next = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = align_next(result, alignment, size);
  if (!failed && alignment == 64 && from_torch(__builtin_return_address(0))) {
    pthread_mutex_lock(&lock);
    unsigned slot = place(*result);
    while (known[slot].at) slot = (slot + 1) % SLOTS;
    known[slot].at = *result, known[slot].size = size;
    live += size;
    if (live > most) most = live;
    pthread_mutex_unlock(&lock);
  }
  return failed;
}

void free(void *at) {
  if (!free_next) free_next = dlsym(RTLD_NEXT, "free");
  if (at && !((uintptr_t)at & 63)) {
    pthread_mutex_lock(&lock);
    unsigned slot = place(at);
    while (known[slot].at && known[slot].at != at) slot = (slot + 1) % SLOTS;
    if (known[slot].at) {
      live -= known[slot].size;
      known[slot].at = NULL;
      /* Entries behind it that its slot kept from their place move up. */
      for (unsigned next = (slot + 1) % SLOTS; known[next].at; next = (next + 1) % SLOTS) {
        unsigned home = place(known[next].at);
        if (((next - home) % SLOTS) >= ((next - slot) % SLOTS)) {
          known[slot] = known[next];
          known[next].at = NULL;
          slot = next;
        }
      }
    }
    pthread_mutex_unlock(&lock);
  }
  free_next(at);
}
