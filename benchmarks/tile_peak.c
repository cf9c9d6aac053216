/* What tile registers give: tile_peak THREADS prints {"int8": Gop/s, "bf16": Gop/s}, the median of five runs.
 * Four sums of 16 x 16, operands that stay in their registers: the multiplier alone. Built by peaks.py on the machine it runs on. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 256, RUNS = 5, REPEATS = 200000, TILES = 4 };
static pthread_barrier_t meet;
static double took[RUNS + 1];
static int bf16;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void configure(void) {
  struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } __attribute__((aligned(64))) c = {.palette = 1};
  for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
  __asm__ volatile("" : : "r"(&c) : "memory"); /* the intrinsic names only a part of the 64 bytes */
  _tile_loadconfig(&c);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
}

static void multiply(void) {
  if (bf16)
    for (int i = 0; i < REPEATS; i++) {
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
  else
    for (int i = 0; i < REPEATS; i++) {
      _tile_dpbsud(0, 4, 6); _tile_dpbsud(1, 4, 7); _tile_dpbsud(2, 5, 6); _tile_dpbsud(3, 5, 7);
    }
}

static void *work(void *argument) {
  const int first = argument == NULL;
  configure();
  for (int run = 0; run <= RUNS; run++) { /* the first one warms up */
    pthread_barrier_wait(&meet);
    const double begin = seconds();
    multiply();
    pthread_barrier_wait(&meet);
    if (first) took[run] = seconds() - begin;
  }
  _tile_release();
  return NULL;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double rate(int threads) {
  pthread_t others[MOST];
  pthread_barrier_init(&meet, NULL, (unsigned)threads);
  for (int i = 1; i < threads; i++) pthread_create(&others[i], NULL, work, &meet);
  work(NULL);
  for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
  pthread_barrier_destroy(&meet);
  qsort(took + 1, RUNS, sizeof took[0], ascending);
  const double each = 2.0 * 16 * 16 * (bf16 ? 32 : 64) * TILES * REPEATS;
  return each * threads / took[1 + RUNS / 2] / 1e9;
}

int main(int count, char **arguments) {
  const int threads = count > 1 ? atoi(arguments[1]) : 1;
  if (threads < 1 || threads > MOST) return fprintf(stderr, "1 to %d threads\n", MOST), 2;
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return fprintf(stderr, "no permission for tiles\n"), 1;
  bf16 = 0;
  const double int8 = rate(threads);
  bf16 = 1;
  printf("{\"int8\": %.1f, \"bf16\": %.1f}\n", int8, rate(threads));
  return 0;
}
