// Numbers in memory and sixteen of them in registers: what all kernels compute with.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 { std::uint16_t bits; };

inline float load(float x) { return x; }
inline float load(bfloat16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float x, float* to) { *to = x; }
inline void store(float x, bfloat16* to) {  // to the nearest, ties to even
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = std::isnan(x) ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1);
    to->bits = std::uint16_t(bits >> 16);
}

// Sixteen numbers at once: one AVX-512 register, two or four narrower ones elsewhere.
constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Whole __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Lanes lanes(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Lanes lanes(const bfloat16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    Whole bits = __builtin_convertvector(x, Whole) << 16;
    Lanes value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline void keep(Lanes x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void keep(Lanes x, bfloat16* to) {  // to the nearest, ties to even
    Bits bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = x == x ? bits + 0x7fffu + ((bits >> 16) & 1) : 0x7fc00000u + Bits{};
    Halves halves = __builtin_convertvector(bits >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

}  // namespace
