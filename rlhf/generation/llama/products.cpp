// Products of few rows with a weight that stays: a decoding step's, where the library's own leave up to half of
// the processor's rate unused. Compiled where registers are 512 bits wide, and for bfloat16 where the processor multiplies
// pairs of it; processors with tile registers (AMX) have something better, which the library uses.
//
// An element of the result is summed up in one order, whatever the other rows and the number of threads. Weights lie in
// panels of PANEL outputs, (panels, inputs / PAIR, PANEL, PAIR): PAIR neighbouring inputs fill four bytes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#ifdef __AVX512F__

#include <immintrin.h>

namespace {

constexpr int WIDTH = PANEL / LANES;
constexpr int TILE = 8;  // rows: TILE * WIDTH sums, a step's WIDTH weights and a number fit into 32 registers
constexpr int BLOCK_ROWS = 128;  // rows of a longer pass that a panel meets before the next: they stay in a core's cache
template <typename T>
constexpr int PAIR = 4 / sizeof(T);

// Adds the products of one step, PAIR inputs of R rows with a panel's weights.
template <int R>
inline void step(const float* x, std::int64_t inputs, const float* weight, Lanes (&sums)[R][WIDTH]) {
    Lanes w[WIDTH];
    for (int i = 0; i < WIDTH; i++) w[i] = lanes(weight + i * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) sums[r][i] += x[r * inputs] * w[i];
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define BFLOAT16_PRODUCTS
template <int R>
inline void step(const bfloat16* x, std::int64_t inputs, const bfloat16* weight, Lanes (&sums)[R][WIDTH]) {
    __m512bh w[WIDTH];
    for (int i = 0; i < WIDTH; i++) std::memcpy(w + i, weight + i * LANES * PAIR<bfloat16>, sizeof *w);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        int pair;
        std::memcpy(&pair, x + r * inputs, sizeof pair);
        const __m512bh pairs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) sums[r][i] = (Lanes)_mm512_dpbf16_ps((__m512)sums[r][i], pairs, w[i]);
    }
}
#endif

// What is fetched of the next panel while a tile is computed: `lines` cache lines a step, `stride` bytes from step to
// step, so that all tiles together fetch all of it.
struct Ahead {
    const char* from;
    int lines, stride;
};

// R rows of a panel's outputs, the first `width` of which exist.
template <int R, typename T, typename Out>
void tile(const T* x, const T* weight, const float* bias, Ahead ahead, Out* out, int inputs, int outputs, int width) {
    Lanes sums[R][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) sums[r][i] = bias ? lanes(bias + i * LANES) : Lanes{};
    for (int k = 0; k < inputs / PAIR<T>; k++) {
        for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.from + std::int64_t(k) * ahead.stride + i * 64, 0, 2);
        step<R>(x + k * PAIR<T>, inputs, weight + std::int64_t(k) * PANEL * PAIR<T>, sums);
    }
    for (int r = 0; r < R; r++) {
        Out whole[PANEL];
        Out* to = width == PANEL ? out + std::int64_t(r) * outputs : whole;
        for (int i = 0; i < WIDTH; i++) keep(sums[r][i], to + i * LANES);
        if (width < PANEL) std::copy(whole, whole + width, out + std::int64_t(r) * outputs);
    }
}

// A tile of the rows that are left, R at the most.
template <int R, typename T, typename Out>
void tile_of(int left, const T* x, const T* weight, const float* bias, Ahead ahead, Out* out, int inputs, int outputs,
               int width) {
    if constexpr (R > 1)
        if (left < R) return tile_of<R - 1>(left, x, weight, bias, ahead, out, inputs, outputs, width);
    tile<R>(x, weight, bias, ahead, out, inputs, outputs, width);
}

// A product of a block of rows.
template <typename T, typename Out>
void multiply_block(const T* x, const T* weight, const float* bias, Out* out, int rows, int inputs, int outputs,
                    int threads) {
    const int panels = (outputs + PANEL - 1) / PANEL, tiles = (rows + TILE - 1) / TILE, steps = inputs / PAIR<T>;
    const std::int64_t size = std::int64_t(inputs) * PANEL;
    const int stride = std::max(1, WIDTH * 64 / tiles);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int p = 0; p < panels; p++) {
        const int width = std::min(PANEL, outputs - p * PANEL);
        const T* panel = weight + p * size;
        for (int t = 0; t < tiles; t++) {
            const int left = rows - t * TILE;
            const T* from = x + std::int64_t(t) * TILE * inputs;
            const float* start = bias ? bias + p * PANEL : nullptr;
            const Ahead ahead{reinterpret_cast<const char*>(panel + size) + std::int64_t(t) * steps * stride,
                              (WIDTH + tiles - 1) / tiles, stride};
            Out* to = out + std::int64_t(t) * TILE * outputs + p * PANEL;
            tile_of<TILE>(left, from, panel, start, ahead, to, inputs, outputs, width);
        }
    }
}

template <typename T, typename Out>
void multiply(const T* x, const T* weight, const float* bias, Out* out, int rows, int inputs, int outputs, int threads) {
    for (int start = 0; start < rows; start += BLOCK_ROWS)
        multiply_block(x + std::int64_t(start) * inputs, weight, bias, out + std::int64_t(start) * outputs,
                       std::min(BLOCK_ROWS, rows - start), inputs, outputs, threads);
}

// Lays a weight (outputs, units) out in panels; a unit is PAIR neighbouring inputs. The outputs that fill the last panel
// up are 0.
void pack(const std::uint32_t* weight, std::uint32_t* panels, int outputs, int units, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int p = 0; p < (outputs + PANEL - 1) / PANEL; p++) {
        const std::uint32_t* from = weight + std::int64_t(p) * PANEL * units;
        std::uint32_t* to = panels + std::int64_t(p) * PANEL * units;
        const int width = std::min(PANEL, outputs - p * PANEL);
        for (int start = 0; start < units; start += LANES)  // whole cache lines of each output at once
            for (int o = 0; o < PANEL; o++)
                for (int k = start; k < std::min(start + LANES, units); k++)
                    to[k * PANEL + o] = o < width ? from[std::int64_t(o) * units + k] : 0;
    }
}

}  // namespace

#define EXPORT(T, OUT, NAME)                                                                                         \
    void multiply_##NAME(const T* x, const T* weight, const float* bias, OUT* out, int rows, int inputs, int outputs, \
                         int threads) {                                                                              \
        multiply(x, weight, bias, out, rows, inputs, outputs, threads);                                              \
    }

extern "C" {
void pack_panels(const std::uint32_t* weight, std::uint32_t* panels, int outputs, int units, int threads) {
    pack(weight, panels, outputs, units, threads);
}
EXPORT(float, float, float32_float32)
#ifdef BFLOAT16_PRODUCTS
EXPORT(bfloat16, bfloat16, bfloat16_bfloat16)
EXPORT(bfloat16, float, bfloat16_float32)
#endif
}

#endif
