// The parts of one_kernel.cu that know nothing of a layer: products by all warps of a program, and quads that programs leave
// for each other.

__host__ __device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }

constexpr int VALUES = 6;  // of a quad
constexpr int THREADS = 32 * WARPS, HALF = D / 2, INNER = HEADS * D, QKV = INNER + 2 * KV * D;
__host__ __device__ constexpr int most_of(int a, int b) { return a > b ? a : b; }

// A product of ROWS rows of K weights by T vectors, made by all warps of a program: a warp has every WARPS-th unit, which
// is a slice of a row. (Tensor cores would do it in fewer instructions, but a GPU that uses them clocks lower, and here
// that costs more.)
template <int ROWS, int K, int SLICES>
struct Product {
  static constexpr int COUNT = ROWS * SLICES, EACH = up(COUNT, WARPS), WORDS = K / SLICES / 64;
  static constexpr int STRIDE = up(SLICES, 4) * 4, SUMS = T * ROWS * STRIDE;
  u32 w[EACH][WORDS];
  int from[EACH];  // where a lane's weights of a unit begin in the matrix; -1: it has none

  // ``row_of``: the matrix's row that is the program's row r; -1: none.
  template <class Rows>
  __device__ __forceinline__ Product(int warp, int lane, Rows row_of) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int unit = warp + e * WARPS, row = unit < COUNT ? row_of(unit / SLICES) : -1;
      from[e] = row < 0 ? -1 : row * K + unit % SLICES * (K / SLICES) + 2 * lane;
    }
  }

  // Ask for the weights. They are there when they are multiplied, not before.
  __device__ __forceinline__ void load(const u16* matrix) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u16* at = matrix + from[e];
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        w[e][j] = 0;
        if (from[e] >= 0) w[e][j] = ask_once(at + 64 * j);
      }
    }
  }

  // Partial sums to out[token][row][slice]; x: bfloat16 [T][K] in shared memory.
  __device__ __forceinline__ void multiply(const u16* x, float* out, int warp, int lane) {
    float acc[EACH][T] = {};
    const u32* mine = (const u32*)x + warp % SLICES * (K / SLICES / 2) + lane;  // a warp's units are the same slice
#pragma unroll
    for (int j = 0; j < WORDS; j++)
#pragma unroll
      for (int t = 0; t < T; t++) {
        u32 v = mine[t * (K / 2) + 32 * j];
#pragma unroll
        for (int e = 0; e < EACH; e++) acc[e][t] += low(w[e][j]) * low(v) + high(w[e][j]) * high(v);
      }
#pragma unroll
    for (int o = 16; o; o >>= 1)
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int t = 0; t < T; t++) acc[e][t] += __shfl_xor_sync(~0u, acc[e][t], o);
    if (lane > 0) return;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int unit = warp + e * WARPS;
#pragma unroll
      for (int t = 0; t < T; t++)
        if (unit < COUNT) out[(t * ROWS + unit / SLICES) * STRIDE + unit % SLICES] = acc[e][t];
    }
  }

  static __device__ __forceinline__ float sum(const float* sums, int token, int row) {
    const float* at = sums + (token * ROWS + row) * STRIDE;
    float total = 0;
#pragma unroll
    for (int s = 0; s < SLICES; s++) total += at[s];
    return total;
  }
};
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// The last word of a quad: its mark, and what makes the xor of all four that mark. So every word is used wherever one is:
// of a quad whose y and z went unused, ptxas made two loads, and new marks came with old values.
__device__ __forceinline__ u32 sealed(u32 x, u32 y, u32 z, u32 mark) { return x ^ y ^ z ^ mark; }

// Wait for COUNT quads; those at null are not wanted.
template <int COUNT>
__device__ __forceinline__ void await(uint4 (&quad)[COUNT], const uint4* const (&at)[COUNT], u32 mark) {
  for (int tries = 0;; tries++) {
    bool there = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (at[i]) quad[i] = look(at[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (at[i] && quad[i].w != sealed(quad[i].x, quad[i].y, quad[i].z, mark)) there = false;
    if (there) return;
    if (tries > 1 << 24) __trap();  // some program is gone: better an error than for ever
  }
}

// A warp's lanes have a word each: leave those of the first ROWS / 2 lanes as quads, on every copy of a board of SIZE.
template <int ROWS, int SIZE>
__device__ __forceinline__ void leave_rows(uint4* place, u32 word, int lane, u32 mark) {
  constexpr int QUADS = up(ROWS, VALUES), AT_A_TIME = 32 / QUADS;
  int q = lane % QUADS;
  u32 x = __shfl_sync(~0u, word, q * 3 & 31), y = __shfl_sync(~0u, word, q * 3 + 1 & 31);
  u32 z = __shfl_sync(~0u, word, q * 3 + 2 & 31);
#pragma unroll
  for (int copy = 0; copy < COPIES; copy += AT_A_TIME) {
    int c = copy + lane / QUADS;
    if (c < COPIES && lane / QUADS < AT_A_TIME) leave(place + c * SIZE + q, x, y, z, sealed(x, y, z, mark));
  }
}

// Wait for vectors of N values, ROWS from each program, and give each word to ``take(token, its first value's index,
// word, weights)``; weights [N] are loaded before the wait. Then ``quad_done(token, quad)``.
template <int N, int ROWS, bool WEIGHTS, class Take, class Done>
__device__ __forceinline__ void gather(const uint4* board, const u16* weights, u32 mark, int thread, Take take,
                                       Done quad_done) {
  constexpr int QUADS = up(ROWS, VALUES), HAVE = up(N, ROWS), ALL = T * HAVE * QUADS, EACH = up(ALL, THREADS);
  board += blockIdx.x % COPIES * ALL;
  const uint4* at[EACH];
  uint4 quad[EACH];
  u32 weight[EACH][3];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int q = thread + e * THREADS, row = q / QUADS % HAVE * ROWS + q % QUADS * VALUES;
    at[e] = q < ALL ? board + q : nullptr;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      weight[e][i] = 0;
      if (WEIGHTS && at[e] && row + 2 * i < N) weight[e][i] = ask(weights + row + 2 * i);
    }
  }
  await(quad, at, mark);
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!at[e]) continue;
    int q = thread + e * THREADS, t = q / (HAVE * QUADS), first = q % QUADS * VALUES, row = q / QUADS % HAVE * ROWS + first;
    u32 w[3] = {quad[e].x, quad[e].y, quad[e].z};
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (first + 2 * i < ROWS && row + 2 * i < N) take(t, row + 2 * i, w[i], weight[e][i]);
    quad_done(t, q % (HAVE * QUADS));
  }
}
