// What a decoding step does between its matrix products, each in one pass over its rows.
//
// A row's result depends neither on the other rows nor on the number of threads: one thread computes one row, or one
// of its key-value heads, always in the same order. T is the type of the matrix products; sums are in float32.
//
// Keys lie transposed in blocks, (row, kv head, block, head size, BLOCK), so that the scores of neighbouring places are
// computed together; values lie (row, kv head, capacity, head size). kernels.py gives BLOCK, MAX_GROUP, MAX_SIZE and
// VOCABULARY_BLOCK to the compiler.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

// What all rows of a layer have in common; the names are those of `Heads` in kernels.py.
struct Heads {
    const float *cos, *sin, *query_norm, *key_norm;
    int kv_heads, group, size, capacity;
    float scale, epsilon;
};

namespace {

typedef double Doubles __attribute__((vector_size(LANES * 8)));

// exp for x <= 0 within 2 units in the last place (Cephes' polynomial); below -87, where it would vanish, exp(-87).
inline Lanes exp_negative(Lanes x) {
    x = x < -87.0f ? -87.0f + Lanes{} : x;
    Whole n = __builtin_convertvector(x * 1.44269504f - 0.5f, Whole);  // towards 0: to the nearest, x being negative
    Lanes m = __builtin_convertvector(n, Lanes);
    Lanes r = x - m * 0.693359375f + m * 2.12194440e-4f;
    Lanes p = 1.9875691500e-4f + Lanes{};
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Whole bits = (n + 127) << 23;
    Lanes power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float sum(Lanes x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// Softmax of the scores in place, without the division; returns the sum. The places up to the next multiple of LANES
// are written as well, with 0.
float exponentials(float* scores, int length) {
    const int end = (length + LANES - 1) / LANES * LANES;
    std::fill(scores + length, scores + end, -INFINITY);
    Lanes tops = -INFINITY + Lanes{};
    for (int t = 0; t < end; t += LANES) {
        Lanes x = lanes(scores + t);
        tops = x > tops ? x : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, tops[i]);
    Lanes sums = {};
    for (int t = 0; t < end; t += LANES) {
        Lanes x = lanes(scores + t), e = exp_negative(x - top);
        e = x == -INFINITY ? Lanes{} : e;
        sums += e;
        keep(e, scores + t);
    }
    return std::isfinite(top) ? sum(sums) : NAN;
}

// Asks for `count` numbers that will be read soon: the cache is larger than the processor's, and read in pieces of a few
// kilobytes, too short for the processor to foresee.
template <typename T>
inline void fetch(const T* from, int count) {
    constexpr int LINE = 64 / sizeof(T);
    for (int i = 0; i < count; i += LINE) __builtin_prefetch(from + i);
}

// Scores of G queries over one block of keys, (size, BLOCK): each key is loaded once for all of them. Meanwhile as many
// numbers `ahead` are fetched.
template <int G, typename T>
inline void block_scores(const float* queries, const T* keys, const T* ahead, float* scores, int size, int capacity) {
    Lanes sums[G][BLOCK / LANES] = {};
    for (int d = 0; d < size; d++) {
        Lanes key[BLOCK / LANES];
        fetch(ahead + d * BLOCK, BLOCK);
        for (int i = 0; i < BLOCK / LANES; i++) key[i] = lanes(keys + d * BLOCK + i * LANES);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < BLOCK / LANES; i++) sums[g][i] += queries[g * size + d] * key[i];
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < BLOCK / LANES; i++) keep(sums[g][i], scores + std::int64_t(g) * capacity + i * LANES);
}

// Adds `length` values, (length, size), to what G queries read, each with its weight. Meanwhile as many numbers `ahead`
// are fetched.
template <int G, typename T>
inline void block_values(const float* weights, const T* values, const T* ahead, float* read, int size, int capacity,
                         int length) {
    constexpr int WIDTH = 2;
    int d = 0;
    for (; d + WIDTH * LANES <= size; d += WIDTH * LANES) {
        Lanes sums[G][WIDTH];
        for (int g = 0; g < G; g++)
            for (int i = 0; i < WIDTH; i++) sums[g][i] = lanes(read + g * size + d + i * LANES);
        for (int t = 0; t < length; t++) {
            Lanes value[WIDTH];
            fetch(ahead + std::int64_t(t) * size + d, WIDTH * LANES);
            for (int i = 0; i < WIDTH; i++) value[i] = lanes(values + std::int64_t(t) * size + d + i * LANES);
            for (int g = 0; g < G; g++)
                for (int i = 0; i < WIDTH; i++) sums[g][i] += weights[std::int64_t(g) * capacity + t] * value[i];
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < WIDTH; i++) keep(sums[g][i], read + g * size + d + i * LANES);
    }
    for (; d < size; d++)
        for (int g = 0; g < G; g++)
            for (int t = 0; t < length; t++)
                read[g * size + d] += weights[std::int64_t(g) * capacity + t] * load(values[std::int64_t(t) * size + d]);
}

// What G queries read from the places [0, length) of one key-value head; keys lie in whole blocks. The next head's keys
// lie behind this one's.
template <int G, typename T>
void attend(const float* queries, const T* keys, const T* values, T* out, float* scores, int size, int capacity,
            int length) {
    float sums[G], read[G * MAX_SIZE] = {};
    for (int start = 0; start < length; start += BLOCK)
        block_scores<G>(queries, keys + std::int64_t(start) * size, values + std::int64_t(start) * size, scores + start,
                        size, capacity);
    for (int g = 0; g < G; g++) sums[g] = exponentials(scores + std::int64_t(g) * capacity, length);
    for (int start = 0; start < length; start += BLOCK)
        block_values<G>(scores + start, values + std::int64_t(start) * size,
                        keys + std::int64_t(capacity + start) * size, read, size, capacity,
                        std::min(BLOCK, length - start));
    for (int g = 0; g < G; g++)
        for (int d = 0; d < size; d++) store(read[g * size + d] / sums[g], out + g * size + d);
}

// Root mean square of a vector, as the factor that normalises it.
inline float normaliser(const float* x, int size, float epsilon) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int d = 0; d < size; d++) squares += x[d] * x[d];
    return 1 / std::sqrt(squares / size + epsilon);
}

// A head, times a factor, normalised if there is a weight, at its rotary position; the halves of its width are the pairs.
template <typename T>
void place(const T* head, const float* weight, float epsilon, const float* cos, const float* sin, int size, float times,
           float* out) {
    float x[MAX_SIZE];
    for (int d = 0; d < size; d++) x[d] = load(head[d]);
    if (weight) {
        const float factor = normaliser(x, size, epsilon);
        for (int d = 0; d < size; d++) x[d] *= factor * weight[d];
    }
    const int half = size / 2;
    for (int d = 0; d < half; d++) {
        out[d] = (x[d] * cos[d] - x[d + half] * sin[d]) * times;
        out[d + half] = (x[d + half] * cos[d + half] + x[d] * sin[d + half]) * times;
    }
}

// One token of one key-value head: its key and value into the cache, then what its group of queries reads.
template <typename T>
void step(const Heads& h, const T* qkv, T* keys, T* values, T* out, int row, int kv_head, int place_, float* scores) {
    const T* token = qkv + std::int64_t(row) * (h.kv_heads * (h.group + 2)) * h.size;
    const float *cos = h.cos + std::int64_t(place_) * h.size, *sin = h.sin + std::int64_t(place_) * h.size;
    float queries[MAX_GROUP * MAX_SIZE], key[MAX_SIZE];
    for (int g = 0; g < h.group; g++)
        place(token + (kv_head * h.group + g) * h.size, h.query_norm, h.epsilon, cos, sin, h.size, h.scale,
              queries + g * h.size);
    place(token + (h.kv_heads * h.group + kv_head) * h.size, h.key_norm, h.epsilon, cos, sin, h.size, 1,
          key);
    const T* value = token + (h.kv_heads * (h.group + 1) + kv_head) * h.size;
    const std::int64_t job = std::int64_t(row) * h.kv_heads + kv_head, cache = job * h.size * h.capacity;
    T* block = keys + cache + std::int64_t(place_ / BLOCK * BLOCK) * h.size;
    for (int d = 0; d < h.size; d++) store(key[d], block + d * BLOCK + place_ % BLOCK);
    std::copy(value, value + h.size, values + cache + std::int64_t(place_) * h.size);
    for (int g = 0; g < h.group;) {
        const int left = h.group - g, taken = left >= 3 ? 3 : left;  // of three, everything stays in registers
        const float* from = queries + g * h.size;
        T* to = out + (job * h.group + g) * h.size;
        if (taken == 3) attend<3>(from, keys + cache, values + cache, to, scores, h.size, h.capacity, place_ + 1);
        if (taken == 2) attend<2>(from, keys + cache, values + cache, to, scores, h.size, h.capacity, place_ + 1);
        if (taken == 1) attend<1>(from, keys + cache, values + cache, to, scores, h.size, h.capacity, place_ + 1);
        g += taken;
    }
}

template <typename T>
void decode(const Heads& h, const T* qkv, T* keys, T* values, T* out, const std::int64_t* places, int rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores(std::size_t(h.group) * h.capacity);
#pragma omp for schedule(static)
        for (int job = 0; job < rows * h.kv_heads; job++) {
            const int row = job / h.kv_heads;
            step(h, qkv, keys, values, out, row, job % h.kv_heads, int(places[row]), scores.data());
        }
    }
}

// Adds a layer's output to the residual stream, if there is one, and normalises the stream.
template <typename T>
void normalise(float* stream, const T* added, const float* weight, T* out, int rows, int size, float epsilon,
               int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        float* x = stream + std::int64_t(row) * size;
        if (added)
            for (int d = 0; d < size; d++) x[d] += load(added[std::int64_t(row) * size + d]);
        const float factor = normaliser(x, size, epsilon);
        for (int d = 0; d < size; d++) store(x[d] * factor * weight[d], out + std::int64_t(row) * size + d);
    }
}

// silu(gate) * up, of rows that hold gate and up side by side.
template <typename T>
void swiglu(const T* gate_up, T* out, int rows, int size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const T *gate = gate_up + std::int64_t(row) * 2 * size, *up = gate + size;
        int d = 0;
        for (; d + LANES <= size; d += LANES) {
            const Lanes x = lanes(gate + d), e = exp_negative(x < 0.0f ? x : -x);
            const Lanes y = x * (x < 0.0f ? e : 1.0f + Lanes{}) / (1.0f + e) * lanes(up + d);
            keep(y, out + std::int64_t(row) * size + d);
        }
        for (; d < size; d++) {
            const float x = load(gate[d]);
            store(x / (1 + std::exp(-x)) * load(up[d]), out + std::int64_t(row) * size + d);
        }
    }
}

// The mass exp(x - top) of LANES logits x / temperature, `left` of which count; 0 for minus infinity.
inline Lanes masses(const float* logits, int left, float temperature, float top) {
    Lanes x = -INFINITY + Lanes{};
    std::memcpy(&x, logits, std::min(left, LANES) * sizeof(float));
    x /= temperature;
    const Lanes e = exp_negative(x - top);
    return x == -INFINITY ? Lanes{} : e;
}

inline double mass_of_block(const float* logits, int left, float temperature, float top) {
    Doubles sums = {};
    for (int t = 0; t < std::min(left, VOCABULARY_BLOCK); t += LANES)
        sums += __builtin_convertvector(masses(logits + t, left - t, temperature, top), Doubles);
    double total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

// The first token of a block at which the running mass exceeds `target`; the last with mass where rounding hides it.
inline int token_of_block(const float* logits, int left, float temperature, float top, double target) {
    double running = 0;
    int last = 0;
    for (int t = 0; t < std::min(left, VOCABULARY_BLOCK); t += LANES) {
        const Lanes e = masses(logits + t, left - t, temperature, top);
        for (int i = 0; i < LANES; i++) {
            running += e[i];
            if (e[i] > 0) last = t + i;
            if (running > target) return t + i;
        }
    }
    return last;
}

// The largest logit and where it stands first; not a number if one is not.
inline int largest(const float* logits, int size, float* top) {
    int place = 0;
    for (int t = 1; t < size; t++)
        if (logits[t] > logits[place]) place = t;
    *top = logits[place];
    return place;
}

// A row's next token by inverting its distribution function at `uniform`, or its likeliest if that is null; returns the
// token's log-probability. `blocks` holds a number for each VOCABULARY_BLOCK logits.
float pick(const float* logits, int size, float temperature, const double* uniform, double* blocks,
           std::int64_t* token) {
    float top;
    *token = largest(logits, size, &top);
    top /= temperature;
    double total = 0;
    for (int start = 0; start < size; start += VOCABULARY_BLOCK) {
        total += mass_of_block(logits + start, size - start, temperature, top);
        blocks[start / VOCABULARY_BLOCK] = total;
    }
    if (uniform && total == total) {
        const double target = *uniform * total;
        int block = 0;
        while ((block + 1) * VOCABULARY_BLOCK < size && blocks[block] <= target) block++;
        const int start = block * VOCABULARY_BLOCK;
        *token = start + token_of_block(logits + start, size - start, temperature, top,
                                        target - (block ? blocks[block - 1] : 0));
    }
    return float(double(logits[*token] / temperature - top) - std::log(total));
}

}  // namespace

#define EXPORT(T, NAME)                                                                                              \
    void decode_##NAME(const Heads* h, const T* qkv, T* keys, T* values, T* out, const std::int64_t* places,         \
                       int rows, int threads) {                                                                      \
        decode(*h, qkv, keys, values, out, places, rows, threads);                                                   \
    }                                                                                                                \
    void normalise_##NAME(float* stream, const T* added, const float* weight, T* out, int rows, int size,            \
                          float epsilon, int threads) {                                                              \
        normalise(stream, added, weight, out, rows, size, epsilon, threads);                                         \
    }                                                                                                                \
    void swiglu_##NAME(const T* gate_up, T* out, int rows, int size, int threads) {                                  \
        swiglu(gate_up, out, rows, size, threads);                                                                   \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)

void pick_float32(const float* logits, const double* uniforms, std::int64_t* tokens, float* logprobs, int rows, int size,
                  float temperature, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> blocks(size / VOCABULARY_BLOCK + 1);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++)
            logprobs[row] = pick(logits + std::int64_t(row) * size, size, temperature,
                                 uniforms ? uniforms + row : nullptr, blocks.data(), tokens + row);
    }
}
}
