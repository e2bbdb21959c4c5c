// Words of memory, and how a GPU reads and writes them. tests/cuda_on_cpu.h has the same for a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// A word is two bfloat16, the first in its lower half.
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u32 narrow(float a, float b) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(b), "f"(a));
  return out;
}

// Ask for a word. It is waited for where it is used, and not before.
__device__ __forceinline__ u32 ask(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 ask_once(const void* p) {  // nobody else here wants it
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// 16 bytes into shared memory, there after ``fetched``; zeros if they are not wanted.
__device__ __forceinline__ void fetch(uint4* to, const void* from, bool wanted) {
  u32 at = (u32)__cvta_generic_to_shared(to), bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Quads that other programs read: 16 bytes that are written, and read, all at once.
__device__ __forceinline__ uint4 look(const uint4* p) {
  u64 a, b;
  asm volatile("{.reg .b128 t; ld.relaxed.gpu.global.b128 t, [%2]; mov.b128 {%0, %1}, t;}"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}
__device__ __forceinline__ void leave(uint4* p, u32 x, u32 y, u32 z, u32 w) {
  u64 a = x | (u64)y << 32, b = z | (u64)w << 32;
  asm volatile("{.reg .b128 t; mov.b128 t, {%0, %1}; st.relaxed.gpu.global.b128 [%2], t;}" ::"l"(a), "l"(b), "l"(p)
               : "memory");
}

