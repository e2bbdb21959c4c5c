// Tile registers (AMX): 16 rows of 64 bytes each, and the sums of products of two of them.
//
// Knows: the instructions, a thread's configuration, the system's permission. Does not know: weights, tokens, scales.
//
//   sums [rows, 16] = numbers [rows, inputs] * weights [inputs, 16]
//
// Registers are not renamed: an instruction that writes one waits until all are done that use what it holds, and each takes
// 14 to 20 cycles by itself, a product 16 however few its rows and inputs are (measured on an Emerald Rapids). So they go
// round: three for sums, three for what changes with every product, and two for what stays for several.
//
// Numbers have signs, weights have none and lie as the packed matrices have them: four inputs of all 16 outputs side by side.
// Sums are whole numbers, so they are the same bits as by any other instructions. HS_EMULATED_TILES: the same in plain C++,
// for tests on processors without them.
#pragma once
#include "core.h"

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512VNNI__) && defined(__linux__) && defined(__x86_64__)
#define HS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(HS_EMULATED_TILES) && !defined(__AVX2__)
#define HS_TILES 1
#include <cstdlib>
#endif

namespace hs {


#if !defined(HS_TILES)

struct TilesOfThread {};
inline bool tiles_permitted() { return false; }

#else

constexpr int TILE_ROWS = 16;
constexpr int ROUND = 2, SUMS = 5;  // of the eight registers, those that change with every product, and sums; 0 and 1 stay

struct alignas(64) TileShapes {  // as the processor wants them
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// ``stay``: numbers stay for several products, and weights change; or else the other way round.
inline TileShapes shapes_of(int rows, int inputs, bool stay) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
        const bool numbers = i < SUMS && (i < ROUND) == stay;
        shapes.bytes[i] = (uint16_t)(numbers ? inputs : 64);
        shapes.rows[i] = (uint8_t)(numbers || i >= SUMS ? rows : inputs / 4);
    }
    return shapes;
}

#if !defined(HS_EMULATED_TILES)

// Asked for once in a process, whose threads then may use them: Linux gives memory for them to nobody else.
inline bool tiles_permitted() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// With "memory": the compilers' own functions do not say that they read it.
HS_INLINE void configure_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
HS_INLINE void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int T> HS_INLINE void tile_load(const void* p, size_t apart) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(apart), "i"(T) : "memory");
}
template <int T> HS_INLINE void tile_store(void* p) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"((size_t)64), "i"(T) : "memory");
}
template <int TO, int A, int W> HS_INLINE void tile_multiply() {
    __asm__ volatile("tilezero %%tmm%c0\n\ttdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(W));
}

#else

struct EmulatedTiles {
    TileShapes shapes;
    uint8_t data[8][TILE_ROWS][64];
};
inline EmulatedTiles& emulated() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}
inline bool tiles_permitted() {
    static const bool permitted = !std::getenv("HS_TILES_REFUSED");
    return permitted;
}
inline void configure_tiles(const TileShapes& shapes) { emulated() = EmulatedTiles{shapes, {}}; }
inline void release_tiles() { emulated() = EmulatedTiles{}; }
template <int T> void tile_load(const void* p, size_t apart) {
    EmulatedTiles& on = emulated();
    memset(on.data[T], 0, sizeof on.data[T]);
    for (int r = 0; r < on.shapes.rows[T]; r++) memcpy(on.data[T][r], (const uint8_t*)p + apart * r, on.shapes.bytes[T]);
}
template <int T> void tile_store(void* p) {
    EmulatedTiles& on = emulated();
    for (int r = 0; r < on.shapes.rows[T]; r++) memcpy((uint8_t*)p + 64 * r, on.data[T][r], on.shapes.bytes[T]);
}
template <int TO, int A, int W> void tile_multiply() {
    EmulatedTiles& on = emulated();
    for (int r = 0; r < on.shapes.rows[A]; r++)
        for (int o = 0; o < LANES; o++) {
            int32_t s = 0;
            for (int k = 0; k < on.shapes.bytes[A]; k++) s += (int8_t)on.data[A][r][k] * on.data[W][k / 4][4 * o + k % 4];
            memcpy(on.data[TO][r] + 4 * o, &s, 4);
        }
}

#endif

// What a thread's registers are configured for; kept from product to product.
struct TilesInUse {
    int rows = 0, inputs = 0;
    bool stay = false;
};
inline TilesInUse& tiles_in_use() {
    static thread_local TilesInUse in_use;
    return in_use;
}
inline void need_tiles(int rows, int inputs, bool stay) {
    TilesInUse& now = tiles_in_use();
    if (now.rows == rows && now.inputs == inputs && now.stay == stay) return;
    configure_tiles(shapes_of(rows, inputs, stay));
    now = {rows, inputs, stay};
}

// At the end of a thread's work: what lies in the registers would be saved whenever the thread sleeps.
struct TilesOfThread {
    ~TilesOfThread() {
        if (!tiles_in_use().rows) return;
        release_tiles();
        tiles_in_use() = {};
    }
};

#endif

}  // namespace hs
