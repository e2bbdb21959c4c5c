// All layers of a small draft in one kernel, for one row and T new tokens.
//
// A small model's step is latency: five launches a layer cost more than its weights. Here one program (block) a
// multiprocessor stays for the whole step. Each has a few rows of every matrix, and asks for the weights of the next
// product before it waits for the inputs of this one.
//
// What a program has worked out, all others read. It is left on a board in quads of 16 bytes: three words of two values
// each, and one that says for which layer of which step they are (``sealed``). A reader asks until that word is right:
// one trip through L2, and no barrier. A quad is written again one layer later, by when every reader has it: nothing
// gets that far without something from each of them. Boards have copies, each for some of the readers: many who ask
// for the same line of L2 wait for each other.
//
// Sizes are known when this is compiled: see one_kernel.py, which puts words.cuh and parts.cuh before this. What only a GPU
// can do is in words.cuh, so that the rest also runs on a CPU, for tests (tests/cuda_on_cpu.h).

// A program has R_... rows of each matrix, in pairs. The quads they fill, and how many programs have some:
constexpr int Q_QKV = up(R_QKV, VALUES), P_QKV = up(QKV, R_QKV);
constexpr int Q_X = up(R_X, VALUES), P_X = up(H, R_X);
constexpr int Q_F = up(R_F, VALUES), P_F = up(F, R_F);
typedef Product<R_QKV, H, S_QKV> Queries;
typedef Product<R_X, INNER, S_O> Output;
typedef Product<2 * R_F, H, S_F> Gates;
typedef Product<R_X, F, S_DOWN> Down;
// Attention: a key is read by LANES lanes, 8 channels each; a program has KEYS keys of one head.
constexpr int LANES = D / 8, AT_ONCE = 32 / LANES, TURNS = KEYS / (WARPS * AT_ONCE), PIECES = D / 4;

struct Layer {
  const u16 *input_norm, *qkv, *qkv_bias, *o, *o_bias, *post_norm, *gate_up, *down;
  u16 *keys, *values;
};

struct Boards {
  uint4 *qkv, *attended, *middle, *hidden, *x;
};

struct Shared {
  Layer layers[LAYERS];
  uint4 old_k[TURNS][THREADS], old_v[TURNS][THREADS];  // each thread reads what it fetched itself
  uint4 normed[T * H / 8], attended[T * INNER / 8], hidden[T * F / 8];  // inputs of the products, bfloat16
  uint4 new_k[T * D / 8], new_v[T * D / 8];
  float4 q[T * D / 4], part[WARPS][T][D / 4];
  float2 stats[WARPS][T];  // largest score, sum
  __align__(16) float sums[most_of(most_of(Queries::SUMS, Output::SUMS), most_of(Gates::SUMS, Down::SUMS))];
  float own[T][R_X];            // the program's rows of the residual stream
  float squares[T][P_X * Q_X];  // of the residual stream, a quad's together
};

// The new tokens' queries of one head over KEYS of its keys, to the board.
__device__ __forceinline__ void attend(Shared& m, int head, int split, int length, float temperature, uint4* board, u32 mark) {
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int c = lane % LANES, group = lane / LANES;
  float q[T][8], score[T][TURNS];
  u32 v[TURNS][4];
#pragma unroll
  for (int t = 0; t < T; t++) {
    float4 a = m.q[t * D / 4 + 2 * c], b = m.q[t * D / 4 + 2 * c + 1];
    q[t][0] = a.x, q[t][1] = a.y, q[t][2] = a.z, q[t][3] = a.w;
    q[t][4] = b.x, q[t][5] = b.y, q[t][6] = b.z, q[t][7] = b.w;
  }
  fetched();
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    int key = split * KEYS + (i * WARPS + warp) * AT_ONCE + group, fresh = min(max(key - length, 0), T - 1);
    uint4 k = *(key < length ? &m.old_k[i][thread] : &m.new_k[fresh * LANES + c]);
    uint4 value = *(key < length ? &m.old_v[i][thread] : &m.new_v[fresh * LANES + c]);
    v[i][0] = value.x, v[i][1] = value.y, v[i][2] = value.z, v[i][3] = value.w;
    u32 w[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
    for (int t = 0; t < T; t++) {
      float s = 0, s2 = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) s += q[t][2 * j] * low(w[j]), s2 += q[t][2 * j + 1] * high(w[j]);
      score[t][i] = s + s2;
    }
  }
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1)
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
      for (int t = 0; t < T; t++) score[t][i] += __shfl_xor_sync(~0u, score[t][i], o);
#pragma unroll
  for (int t = 0; t < T; t++) {
    float top = -1e30f, total = 0, acc[8] = {};
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      int key = split * KEYS + (i * WARPS + warp) * AT_ONCE + group;
      score[t][i] = key <= length + t ? score[t][i] * temperature : -1e30f;
      top = fmaxf(top, score[t][i]);
    }
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      float p = score[t][i] > -1e29f ? exp2f(score[t][i] - top) : 0.f;
      total += p;
#pragma unroll
      for (int j = 0; j < 4; j++) acc[2 * j] += p * low(v[i][j]), acc[2 * j + 1] += p * high(v[i][j]);
    }
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) {
      total += __shfl_xor_sync(~0u, total, o);
#pragma unroll
      for (int j = 0; j < 8; j++) acc[j] += __shfl_xor_sync(~0u, acc[j], o);
    }
    if (group == 0) {
      m.part[warp][t][2 * c] = make_float4(acc[0], acc[1], acc[2], acc[3]);
      m.part[warp][t][2 * c + 1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
      if (c == 0) m.stats[warp][t] = make_float2(top, total);
    }
  }
  __syncthreads();
  if (warp < T) {
    // A lane has four channels of every SHARES-th warp.
    constexpr int SHARES = 32 / PIECES, EACH = WARPS / SHARES, SIZE = T * HEADS * SPLITS * PIECES;
    int t = warp, piece = lane % PIECES;
    float2 s[EACH];
    float top = -1e30f, total = 0, a[4] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = m.stats[i * SHARES + lane / PIECES][t], top = fmaxf(top, s[i].x);
#pragma unroll
    for (int o = PIECES; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float share = exp2f(s[i].x - top);
      float4 p = m.part[i * SHARES + lane / PIECES][t][piece];
      total += share * s[i].y;
      a[0] += share * p.x, a[1] += share * p.y, a[2] += share * p.z, a[3] += share * p.w;
    }
#pragma unroll
    for (int o = PIECES; o < 32; o <<= 1) {
      total += __shfl_xor_sync(~0u, total, o);
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] += __shfl_xor_sync(~0u, a[i], o);
    }
    float by = total > 0 ? __fdividef(1.f, total) : 0.f;
    float weight = total > 0 ? top + __log2f(total) : -1e30f;  // of this split among the head's
    u32 x = narrow(a[0] * by, a[1] * by), y = narrow(a[2] * by, a[3] * by), z = __float_as_uint(weight);
    uint4* place = board + ((t * HEADS + head) * SPLITS + split) * PIECES + piece;
#pragma unroll
    for (int c = lane / PIECES; c < COPIES; c += SHARES) leave(place + c * SIZE, x, y, z, sealed(x, y, z, mark));
  }
}

// Wait for the attended values of all heads, and join what several splits found.
__device__ __forceinline__ void gather_attended(Shared& m, const uint4* board, int splits, u32 mark, int thread) {
  constexpr int ALL = T * HEADS * PIECES;
  board += blockIdx.x % COPIES * ALL * SPLITS;
#pragma unroll
  for (int e = 0; e < up(ALL, THREADS); e++) {
    int p = thread + e * THREADS;
    if (p >= ALL) return;
    const uint4* at[SPLITS];
    uint4 quad[SPLITS];
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      at[s] = s < splits ? board + (p / PIECES * SPLITS + s) * PIECES + p % PIECES : nullptr;
    await(quad, at, mark);
    float top = -1e30f, total = 0, a[4] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      if (at[s]) top = fmaxf(top, __uint_as_float(quad[s].z));
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      if (at[s]) {
        float share = exp2f(__uint_as_float(quad[s].z) - top);
        total += share;
        a[0] += share * low(quad[s].x), a[1] += share * high(quad[s].x);
        a[2] += share * low(quad[s].y), a[3] += share * high(quad[s].y);
      }
    float by = __fdividef(1.f, total);
    ((uint2*)m.attended)[p] = make_uint2(narrow(a[0] * by, a[1] * by), narrow(a[2] * by, a[3] * by));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    step(const Layer* layers, const u16* embedding, const u16* last_norm, const i64* tokens, const i64* lengths,
         const float* cos, const float* sin, i64 capacity, i64 row_at, Boards board, u32* epoch, u16* scaled,
         float* squares) {
  Shared& m = *(Shared*)shared_memory();
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int program = blockIdx.x;
  u32 base = *(volatile u32*)epoch;
  // An idle row may be longer than this was compiled for. What is worked out for it does not matter.
  const i64 room = min(capacity, (i64)SPLITS * KEYS) - T;
  const int length = (int)min(lengths[0], room), splits = up(length + T, KEYS);
  const bool fits = lengths[0] <= room;
  const int unit = PROGRAMS - 1 - program;  // of attention, from the end: the last programs have the least to do else
  const bool attends = unit < HEADS * splits;
  const int head = unit % HEADS, split = unit / HEADS, kv = head / (HEADS / KV);
  const float temperature = rsqrtf((float)D) * 1.4426950408889634f;

  // Rows of queries, keys and values come in the pairs that turn together.
  const int pair = (program * R_QKV) / 2 + lane, pair_head = pair / HALF, channel = pair % HALF;
  auto qkv_row = [&](int r) {
    int p = (program * R_QKV + r) / 2;
    return p < QKV / 2 ? p / HALF * D + p % HALF + r % 2 * HALF : -1;
  };
  auto x_row = [&](int r) { int n = program * R_X + r; return n < H ? n : -1; };
  auto f_row = [&](int r) { int n = program * R_F + r % R_F; return n < F ? n + (r < R_F ? 0 : F) : -1; };
  const bool has_qkv = program < P_QKV, has_x = program < P_X, has_f = program < P_F;
  if (!attends && !has_qkv && !has_x && !has_f) return;  // nobody would wait for it
  const bool my_pair = lane < R_QKV / 2 && pair < QKV / 2;
  const int my_x = program * R_X + 2 * lane, my_f = program * R_F + 2 * lane;
  const bool x_mine = 2 * lane < R_X && my_x < H, f_mine = 2 * lane < R_F && my_f < F;

  Queries w_qkv(warp, lane, qkv_row);
  Output w_o(warp, lane, x_row);
  Gates w_f(warp, lane, f_row);
  Down w_down(warp, lane, x_row);

  w_qkv.load(layers[0].qkv);
  for (int i = thread; i < (int)(sizeof(m.layers) / 8); i += THREADS) ((u64*)m.layers)[i] = ((const u64*)layers)[i];
  float turn_cos = 1, turn_sin = 0;  // of this warp's token, for this lane's pair
  const i64 slot = (i64)length + warp;
  if (warp < T && my_pair && pair_head < HEADS + KV) {
    i64 at = slot * HALF + channel;
    turn_cos = cos[at], turn_sin = sin[at];
  }
  __syncthreads();

  // The residual stream, a word at a time: normed for the next product; its squares; the program's own rows.
  float square = 0;
  auto take_x = [&](int t, int n, u32 w, u32 g) {
    float a = low(w), b = high(w);
    ((u32*)m.normed)[(t * H + n) / 2] = narrow(a * low(g), b * high(g));
    square += a * a + b * b;
    int mine = n - program * R_X;
    if (mine >= 0 && mine < R_X) m.own[t][mine] = a, m.own[t][mine + 1] = b;
  };
  auto squared = [&](int t, int quad) { m.squares[t][quad] = square, square = 0; };
  auto inverse_rms = [&](int count) {  // for warps below T, each its token
    float s = 0;
    if (warp < T)
      for (int i = lane; i < count; i += 32) s += m.squares[warp][i];
    return rsqrtf(sum_of_warp(s) / H + EPS);
  };

#pragma unroll 1
  for (int l = 0; l < LAYERS; l++) {
    const u32 mark = base + l + 1;
    const Layer& layer = m.layers[l];
    if (attends) {  // what attention wants of earlier tokens
#pragma unroll
      for (int i = 0; i < TURNS; i++) {
        int key = split * KEYS + (i * WARPS + warp) * AT_ONCE + lane / LANES;
        bool seen = key < length;
        i64 at = seen ? row_at + ((i64)kv * capacity + key) * D + lane % LANES * 8 : 0;
        fetch(&m.old_k[i][thread], layer.keys + at, seen);
        fetch(&m.old_v[i][thread], layer.values + at, seen);
      }
    }
    w_o.load(layer.o);

    // Queries, keys and values.
    float bias_a = 0, bias_b = 0;
    if (QKV_BIAS && my_pair && warp < T) {
      const u16* bias = layer.qkv_bias + pair_head * D + channel;
      bias_a = wide(bias[0]), bias_b = wide(bias[HALF]);
    }
    if (l == 0) {
#pragma unroll
      for (int t = 0; t < T; t++) {
        for (int n = 2 * thread; n < H; n += 2 * THREADS)
          take_x(t, n, ask(embedding + tokens[t] * H + n), ask(layer.input_norm + n));
        square = sum_of_warp(square);
        if (lane == 0) m.squares[t][warp] = square;
        square = 0;
      }
    } else {
      gather<H, R_X, true>(board.x, layer.input_norm, mark - 1, thread, take_x, squared);
    }
    __syncthreads();
    float by = inverse_rms(l == 0 ? WARPS : P_X * Q_X);
    w_qkv.multiply((const u16*)m.normed, m.sums, warp, lane);
    __syncthreads();
    if (warp < T && has_qkv) {
      u32 word = 0;
      if (my_pair) {
        float a = Queries::sum(m.sums, warp, 2 * lane) * by + bias_a;
        float b = Queries::sum(m.sums, warp, 2 * lane + 1) * by + bias_b;
        word = narrow(a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin);
      }
      leave_rows<R_QKV, T * P_QKV * Q_QKV>(board.qkv + (warp * P_QKV + program) * Q_QKV, word, lane, mark);
      if (my_pair && pair_head >= HEADS && fits) {
        bool key = pair_head < HEADS + KV;
        u16* to = (key ? layer.keys : layer.values) + row_at + channel +
                  ((i64)(pair_head - HEADS - (key ? 0 : KV)) * capacity + slot) * D;
        to[0] = (u16)word, to[HALF] = (u16)(word >> 16);
      }
    }

    // Attention.
    w_f.load(layer.gate_up);
    if (attends) {
      constexpr int PAIRS = R_QKV / 2, MOST = (up(HALF, PAIRS) + 1) * Q_QKV;  // quads that may have something of a head
#pragma unroll
      for (int e = 0; e < up(T * 3 * MOST, THREADS); e++) {
        int i = thread + e * THREADS, t = i / (3 * MOST), which = i / MOST % 3;
        int from = (which == 0 ? head : which == 1 ? HEADS + kv : HEADS + KV + kv) * HALF;
        int p = from / PAIRS + i % MOST / Q_QKV, first = p * PAIRS + i % Q_QKV * 3;
        if (t >= T || p >= P_QKV || first >= from + HALF || first + 3 <= from) continue;
        const uint4* at[1] = {board.qkv + ((program % COPIES * T + t) * P_QKV + p) * Q_QKV + i % Q_QKV};
        uint4 quad[1];
        await(quad, at, mark);
        u32 w[3] = {quad[0].x, quad[0].y, quad[0].z};
#pragma unroll
        for (int j = 0; j < 3; j++) {
          int n = first + j - from;
          if (i % Q_QKV * 3 + j >= PAIRS || n < 0 || n >= HALF) continue;
          if (which == 0) {
            ((float*)m.q)[t * D + n] = low(w[j]), ((float*)m.q)[t * D + n + HALF] = high(w[j]);
          } else {
            u16* to = (u16*)(which == 1 ? m.new_k : m.new_v) + t * D + n;
            to[0] = (u16)w[j], to[HALF] = (u16)(w[j] >> 16);
          }
        }
      }
      __syncthreads();
      attend(m, head, split, length, temperature, board.attended, mark);
    }

    // Output projection.
    bias_a = bias_b = 0;
    if (O_BIAS && x_mine && warp < T) bias_a = wide(layer.o_bias[my_x]), bias_b = wide(layer.o_bias[my_x + 1]);
    if (has_x) gather_attended(m, board.attended, splits, mark, thread);
    __syncthreads();
    w_o.multiply((const u16*)m.attended, m.sums, warp, lane);
    __syncthreads();
    if (warp < T && has_x) {
      u32 word = 0;
      if (x_mine)
        word = narrow(Output::sum(m.sums, warp, 2 * lane) + m.own[warp][2 * lane] + bias_a,
                      Output::sum(m.sums, warp, 2 * lane + 1) + m.own[warp][2 * lane + 1] + bias_b);
      leave_rows<R_X, T * P_X * Q_X>(board.middle + (warp * P_X + program) * Q_X, word, lane, mark);
    }

    // Gate and up.
    w_down.load(layer.down);
    gather<H, R_X, true>(board.middle, layer.post_norm, mark, thread, take_x, squared);
    __syncthreads();
    by = inverse_rms(P_X * Q_X);
    w_f.multiply((const u16*)m.normed, m.sums, warp, lane);
    __syncthreads();
    if (warp < T && has_f) {
      u32 word = 0;
      if (f_mine) {
        float gate[2], rest[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          gate[i] = Gates::sum(m.sums, warp, 2 * lane + i) * by;
          rest[i] = Gates::sum(m.sums, warp, R_F + 2 * lane + i) * by;
          gate[i] = __fdividef(gate[i], 1 + exp2f(-1.4426950408889634f * gate[i])) * rest[i];
        }
        word = narrow(gate[0], gate[1]);
      }
      leave_rows<R_F, T * P_F * Q_F>(board.hidden + (warp * P_F + program) * Q_F, word, lane, mark);
    }

    // Down.
    if (l + 1 < LAYERS) w_qkv.load(m.layers[l + 1].qkv);
    auto take_hidden = [&](int t, int n, u32 w, u32) { ((u32*)m.hidden)[(t * F + n) / 2] = w; };
    if (has_x) gather<F, R_F, false>(board.hidden, nullptr, mark, thread, take_hidden, [](int, int) {});
    __syncthreads();
    w_down.multiply((const u16*)m.hidden, m.sums, warp, lane);
    __syncthreads();
    if (warp < T && has_x) {
      float a = 0, b = 0;
      if (x_mine) {
        a = Down::sum(m.sums, warp, 2 * lane) + m.own[warp][2 * lane];
        b = Down::sum(m.sums, warp, 2 * lane + 1) + m.own[warp][2 * lane + 1];
      }
      u32 word = narrow(a, b);
      if (l + 1 < LAYERS) {
        leave_rows<R_X, T * P_X * Q_X>(board.x + (warp * P_X + program) * Q_X, word, lane, mark);
      } else if (warp == T - 1) {
        a = low(word), b = high(word);
        float s = sum_of_warp(a * a + b * b);
        if (x_mine) {
          u32 g = ask(last_norm + my_x);
          *(u32*)(scaled + my_x) = narrow(a * low(g), b * high(g));
        }
        if (lane == 0) squares[program] = s;
      }
    }
  }
  // Every program has read the epoch by now: nothing would have come this far otherwise.
  if (program == 0 && thread == 0) *epoch = base + LAYERS;
}

extern "C" __device__ const int step_memory = sizeof(Shared);
