// Runs a CUDA kernel on a CPU, slowly and on one core: every thread of every program is a fiber of its own. For tests of
// what a kernel works out where there is no GPU; it says nothing of speed, or of what a GPU may reorder.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Barrier {
  int wanted = 0, here = 0, turn = 0;
};
struct Warp {
  Barrier barrier;
  u32 words[32];
};
struct Program {
  Barrier barrier;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared = nullptr;
};
struct Index {
  int x;
};
struct Fiber {
  ucontext_t context;  // to begin; then jumps, which need no system call
  jmp_buf place;
  bool begun = false;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  Program* program = nullptr;
  bool done = false;
};
static Fiber* current;
static jmp_buf scheduler;
#define threadIdx (current->thread)
#define blockIdx (current->block)

inline void pause() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void resume() {
  if (_setjmp(scheduler)) return;
  if (current->begun) _longjmp(current->place, 1);
  current->begun = true;
  setcontext(&current->context);
}
inline void meet(Barrier& b) {
  int turn = b.turn;
  if (++b.here == b.wanted) {
    b.here = 0, b.turn++;
    return;
  }
  while (b.turn == turn) pause();
}
inline void __syncthreads() { meet(current->program->barrier); }
[[noreturn]] inline void __trap() {
  fprintf(stderr, "trap\n");
  abort();
}

template <class V>
V exchanged(V v, int lane) {
  static_assert(sizeof(V) == 4, "");
  Warp& warp = current->program->warps[threadIdx.x / 32];
  memcpy(&warp.words[threadIdx.x % 32], &v, 4);
  meet(warp.barrier);
  memcpy(&v, &warp.words[lane], 4);
  meet(warp.barrier);
  return v;
}
template <class V>
V __shfl_sync(u32, V v, int lane) { return exchanged(v, lane & 31); }
template <class V>
V __shfl_xor_sync(u32, V v, int mask) { return exchanged(v, (threadIdx.x % 32) ^ mask); }

template <class A>
A min(A a, A b) { return a < b ? a : b; }
template <class A>
A max(A a, A b) { return a < b ? b : a; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float v) { return log2f(v); }

// -- words.cuh

inline unsigned char* shared_memory() { return current->program->shared; }
inline float low(u32 w) { return __uint_as_float(w << 16); }
inline float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
inline float wide(u16 v) { return __uint_as_float((u32)v << 16); }
inline u32 half_word(float f) {
  u32 v = __float_as_uint(f);
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline u32 narrow(float a, float b) { return half_word(a) | half_word(b) << 16; }
inline u32 ask(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
inline u32 ask_once(const void* p) { return ask(p); }
inline void fetch(uint4* to, const void* from, bool wanted) {
  memset(to, 0, 16);
  if (wanted) memcpy(to, from, 16);
}
inline void fetched() {}
inline uint4 look(const uint4* p) {  // in two parts, as ptxas does it where it can: a reader must notice that
  uint4 quad = *p;
  pause();
  quad.w = p->w;
  return quad;
}
inline void leave(uint4* p, u32 x, u32 y, u32 z, u32 w) { *p = {x, y, z, w}; }

// Run body() in all threads of all programs. Who goes on next is drawn anew each time around: what depends on an order
// that nothing promises shows.
template <class Body>
void play(int programs, int threads, int bytes, unsigned seed, Body body) {
  static Body* running;
  running = &body;
  std::vector<Program> all(programs);
  std::vector<Fiber> fibers((size_t)programs * threads);
  for (Program& p : all) {
    p.barrier.wanted = threads;
    p.warps.resize(threads / 32);
    for (Warp& w : p.warps) w.barrier.wanted = 32;
    p.memory.reset(new unsigned char[bytes + 16]);
    memset(p.memory.get(), 0xff, bytes + 16);  // NaN, until something is written
    p.shared = p.memory.get() + (16 - (size_t)p.memory.get() % 16) % 16;
  }
  constexpr size_t STACK = 64 * 1024;
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i];
    f.thread.x = (int)(i % threads), f.block.x = (int)(i / threads), f.program = &all[i / threads];
    f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, (void (*)())(+[]() { (*running)(); current->done = true; _longjmp(scheduler, 1); }), 0);
  }
  std::mt19937 draw(seed);
  const int warps = threads / 32;
  std::vector<int> order(programs), lines(warps);
  for (int i = 0; i < warps; i++) lines[i] = i;
  for (int i = 0; i < programs; i++) order[i] = i;
  for (size_t left = fibers.size(); left;) {
    for (int i = programs - 1; i > 0; i--) std::swap(order[i], order[draw() % (i + 1)]);
    for (int p : order) {
      if (draw() % 3 == 0) continue;  // some programs are slow
      for (int i = warps - 1; i > 0; i--) std::swap(lines[i], lines[draw() % (i + 1)]);
      for (int w : lines) {
        if (draw() % 3 == 0) continue;  // and some warps
        for (int i = 0; i < 32; i++) {
          Fiber& f = fibers[((size_t)p * warps + w) * 32 + i];
          if (f.done) continue;
          current = &f;
          resume();
          if (f.done) left--;
        }
      }
    }
  }
}
