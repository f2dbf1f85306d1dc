// The arithmetic on a range of elements, for one instruction set. Included once for each, without include guards, with
//   BODY         the namespace
//   TARGET       the attribute that lets the compiler use the instruction set
//   STREAM(d, s) copies a 64-byte line from aligned `s` to aligned `d` past the caches
//   FMA(a, b, c) a * b + c, rounded once
// defined. Functions of the standard library must not be called: the linker could take the copy made here for all.
//
// The loops are written for the compiler to vectorise: fixed length, no branches, arrays of their own. An element's
// result depends on its values alone, so all bodies give the same bits.

#define INLINE TARGET static inline __attribute__((always_inline))

namespace BODY {

INLINE float widen_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

// To nearest even; a NaN stays one, whatever its payload.
INLINE uint16_t narrow_bf16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : rounded);
}

// Subnormal halves are multiples of 2^-24, the distance of floats just above 0.5: as such they are read exactly.
INLINE float widen_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const uint32_t subnormal = as_bits(as_float(magnitude | 0x3f000000u) - 0.5f);
  return as_float(sign | (magnitude < 0x0400u ? subnormal : normal));
}

// To nearest even. Adding 0.5 lets the hardware round what will be subnormal.
INLINE uint16_t narrow_fp16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t all = magnitude >= 0x477ff000u ? (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u) : finite;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | all);
}

template <Type T>
INLINE void load(const void* __restrict from, float* __restrict tile) {
  if (T == kFp32) {
    const float* values = static_cast<const float*>(from);
    for (int k = 0; k < kTile; ++k) tile[k] = values[k];
  } else {
    const uint16_t* values = static_cast<const uint16_t*>(from);
    for (int k = 0; k < kTile; ++k) tile[k] = T == kBf16 ? widen_bf16(values[k]) : widen_fp16(values[k]);
  }
}

template <Type T>
INLINE void store(const float* __restrict tile, void* __restrict to) {
  if (T == kFp32) {
    float* values = static_cast<float*>(to);
    for (int k = 0; k < kTile; ++k) values[k] = tile[k];
  } else {
    uint16_t* values = static_cast<uint16_t*>(to);
    for (int k = 0; k < kTile; ++k) values[k] = T == kBf16 ? narrow_bf16(tile[k]) : narrow_fp16(tile[k]);
  }
}

// The integer sum of the bf16 weight's bits, shifted, and the signed remainder is the fp32 weight's bits.
INLINE void load_split(const uint16_t* __restrict high, const int16_t* __restrict low, float* __restrict tile) {
  for (int k = 0; k < kTile; ++k) {
    tile[k] = as_float((static_cast<uint32_t>(high[k]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low[k])));
  }
}

INLINE void store_split(const float* __restrict tile, uint16_t* __restrict high, int16_t* __restrict low) {
  for (int k = 0; k < kTile; ++k) {
    const uint32_t all = as_bits(tile[k]);
    const uint32_t bits = is_nan(all) ? 0x7fc00000u : all;
    high[k] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    low[k] = static_cast<int16_t>(bits & 0xffffu);
  }
}

INLINE void store_out(const float* p, const Arrays& a, Type weight) {
  alignas(64) uint16_t narrow[kTile];
  switch (a.out_type) {
    case kNone:
      return;
    case kFp32:
      store<kFp32>(p, a.out);
      return;
    case kFp16:
      store<kFp16>(p, narrow);
      break;
    default:
      if (weight == kSplit) {
        const uint16_t* high = static_cast<const uint16_t*>(a.weight);
        for (int k = 0; k < kTile; ++k) narrow[k] = high[k];
      } else {
        store<kBf16>(p, narrow);
      }
  }
  uint16_t* out = static_cast<uint16_t*>(a.out);
  if (a.stream) {
    STREAM(out, narrow);
    STREAM(out + kTile / 2, narrow + kTile / 2);
  } else {
    for (int k = 0; k < kTile; ++k) out[k] = narrow[k];
  }
}

// g, p, m, v are distinct arrays of a tile.
INLINE void update(const Scalars& s, float* __restrict g, float* __restrict p, float* __restrict m,
                                 float* __restrict v) {
  for (int k = 0; k < kTile; ++k) g[k] = g[k] * s.grad_scale;
  if (s.l2 != 0.0f) {
    for (int k = 0; k < kTile; ++k) g[k] = FMA(s.l2, p[k], g[k]);
  }
  if (s.lerp_from_grad) {
    for (int k = 0; k < kTile; ++k) m[k] = FMA(s.lerp, g[k] - m[k], g[k]);
  } else {
    for (int k = 0; k < kTile; ++k) m[k] = FMA(s.lerp, g[k] - m[k], m[k]);
  }
  for (int k = 0; k < kTile; ++k) {
    v[k] = FMA(s.square * g[k], g[k], v[k] * s.beta2);
    const float denominator = __builtin_sqrtf(v[k]) / s.sqrt_correction2 + s.eps;
    p[k] = p[k] * s.decay + s.minus_step_size * m[k] / denominator;
  }
}

// One tile: 64 elements at the arrays' beginnings.
template <Type G, Type W, Type M>
INLINE void adam_tile(const Scalars& s, const Arrays& a) {
  alignas(64) float g[kTile], p[kTile], m[kTile], v[kTile];
  load<G>(a.grad, g);
  load<M>(a.exp_avg, m);
  load<M>(a.exp_avg_sq, v);
  if (W == kSplit) {
    load_split(static_cast<const uint16_t*>(a.weight), static_cast<const int16_t*>(a.remainder), p);
  } else {
    load<W>(a.weight, p);
  }
  update(s, g, p, m, v);
  store<M>(m, a.exp_avg);
  store<M>(v, a.exp_avg_sq);
  if (W == kSplit) {
    store_split(p, static_cast<uint16_t*>(a.weight), static_cast<int16_t*>(a.remainder));
  } else {
    store<W>(p, a.weight);
  }
  store_out(p, a, W);
}

// A tile of old values, bit by bit.
template <Type T>
INLINE void keep(const void* from, void* to, bool stream) {
  using Value = typename Raw<T>::type;
  alignas(64) Value tile[kTile];
  for (int k = 0; k < kTile; ++k) tile[k] = static_cast<const Value*>(from)[k];
  if (stream) {
    for (int k = 0; k < kTile; k += 64 / sizeof(Value)) STREAM(static_cast<Value*>(to) + k, tile + k);
  } else {
    for (int k = 0; k < kTile; ++k) static_cast<Value*>(to)[k] = tile[k];
  }
}

template <Type W, Type M>
INLINE void keep_tile(const Arrays& a) {
  keep<W>(a.weight, a.undo_weight, a.streams_undo);
  keep<M>(a.exp_avg, a.undo_exp_avg, a.streams_undo);
  keep<M>(a.exp_avg_sq, a.undo_exp_avg_sq, a.streams_undo);
}

INLINE void prefetch(const void* array, int64_t elements, int64_t size) {
  const char* ahead = static_cast<const char*>(array) + elements * size;
  for (int64_t byte = 0; byte < kTile * size; byte += 64) __builtin_prefetch(ahead + byte, 1);
}

template <Type G, Type W, Type M>
INLINE void prefetch_tile(const Arrays& a) {
  prefetch(a.grad, a.ahead, size_of(G));
  prefetch(a.weight, a.ahead, size_of(W));
  prefetch(a.exp_avg, a.ahead, size_of(M));
  prefetch(a.exp_avg_sq, a.ahead, size_of(M));
  if (W == kSplit) prefetch(a.remainder, a.ahead, 2);
}

// The tile's memory where there are fewer elements than a tile has.
struct Padded {
  alignas(64) unsigned char grad[kTile * 4], weight[kTile * 4], exp_avg[kTile * 4], exp_avg_sq[kTile * 4];
  alignas(64) unsigned char remainder[kTile * 2], out[kTile * 4];

  // Old values are kept here: the copy has none.
  TARGET Arrays fill(const Arrays& from, int64_t numel) {
    if (from.undo_weight != nullptr) {
      __builtin_memcpy(from.undo_weight, from.weight, numel * size_of(from.weight_type));
      __builtin_memcpy(from.undo_exp_avg, from.exp_avg, numel * size_of(from.moment_type));
      __builtin_memcpy(from.undo_exp_avg_sq, from.exp_avg_sq, numel * size_of(from.moment_type));
    }
    __builtin_memset(this, 0, sizeof(Padded));
    __builtin_memcpy(grad, from.grad, numel * size_of(from.grad_type));
    __builtin_memcpy(weight, from.weight, numel * size_of(from.weight_type));
    __builtin_memcpy(exp_avg, from.exp_avg, numel * size_of(from.moment_type));
    __builtin_memcpy(exp_avg_sq, from.exp_avg_sq, numel * size_of(from.moment_type));
    if (from.weight_type == kSplit) __builtin_memcpy(remainder, from.remainder, numel * 2);
    Arrays filled = from;
    filled.grad = grad;
    filled.weight = weight;
    filled.exp_avg = exp_avg;
    filled.exp_avg_sq = exp_avg_sq;
    filled.remainder = remainder;
    filled.out = out;
    filled.undo_weight = nullptr;
    filled.stream = false;
    return filled;
  }

  TARGET void empty(const Arrays& to, int64_t numel) const {
    __builtin_memcpy(to.weight, weight, numel * size_of(to.weight_type));
    __builtin_memcpy(to.exp_avg, exp_avg, numel * size_of(to.moment_type));
    __builtin_memcpy(to.exp_avg_sq, exp_avg_sq, numel * size_of(to.moment_type));
    if (to.weight_type == kSplit) __builtin_memcpy(to.remainder, remainder, numel * 2);
    if (to.out_type != kNone) __builtin_memcpy(to.out, out, numel * size_of(to.out_type));
  }
};

template <Type G, Type W, Type M>
TARGET __attribute__((noinline)) static void whole_tiles(const Scalars& scalars, Arrays a, int64_t numel) {
  const Scalars s = scalars;
  a.grad_type = G;  // known to the compiler from here on
  a.weight_type = W;
  a.moment_type = M;
  for (int64_t done = 0; done < numel; done += kTile, a.advance(kTile)) {
    prefetch_tile<G, W, M>(a);
    if (a.undo_weight != nullptr) keep_tile<W, M>(a);
    adam_tile<G, W, M>(s, a);
  }
}

// Elements before the first cache line and behind the last whole tile go through a padded copy: every element sees the
// same instructions.
template <Type G, Type W, Type M>
TARGET static void pass(const Scalars& s, Arrays a, int64_t numel) {
  Padded padded;
  const int64_t head = elements_before_line(a, numel);
  const int64_t body = (numel - head) / kTile * kTile;
  if (head != 0) {
    whole_tiles<G, W, M>(s, padded.fill(a, head), kTile);
    padded.empty(a, head);
    a.advance(head);
  }
  a.stream = streams(a);
  a.streams_undo = streams_undo(a);
  whole_tiles<G, W, M>(s, a, body);
  a.advance(body);
  const int64_t tail = numel - head - body;
  if (tail != 0) {
    whole_tiles<G, W, M>(s, padded.fill(a, tail), kTile);
    padded.empty(a, tail);
  }
}

template <Type G, Type W>
TARGET static void pass_moments(const Scalars& s, const Arrays& a, int64_t numel) {
  if (a.moment_type == kFp32) pass<G, W, kFp32>(s, a, numel);
  else pass<G, W, kBf16>(s, a, numel);
}

template <Type G>
TARGET static void pass_weights(const Scalars& s, const Arrays& a, int64_t numel) {
  switch (a.weight_type) {
    case kFp32: return pass_moments<G, kFp32>(s, a, numel);
    case kBf16: return pass_moments<G, kBf16>(s, a, numel);
    case kFp16: return pass_moments<G, kFp16>(s, a, numel);
    default: return pass_moments<G, kSplit>(s, a, numel);
  }
}

TARGET static void adam(const Scalars& s, const Arrays& a, int64_t numel) {
  switch (a.grad_type) {
    case kFp32: return pass_weights<kFp32>(s, a, numel);
    case kBf16: return pass_weights<kBf16>(s, a, numel);
    default: return pass_weights<kFp16>(s, a, numel);
  }
}

// What adam_tile reads and writes, next to no arithmetic.
template <Type G, Type W, Type M>
INLINE void touch_tile(const Arrays& a) {
  alignas(64) uint16_t first[kTile];
  const typename Raw<G>::type* g = static_cast<const typename Raw<G>::type*>(a.grad);
  typename Raw<W>::type* p = static_cast<typename Raw<W>::type*>(a.weight);
  typename Raw<M>::type* m = static_cast<typename Raw<M>::type*>(a.exp_avg);
  typename Raw<M>::type* v = static_cast<typename Raw<M>::type*>(a.exp_avg_sq);
  for (int k = 0; k < kTile; ++k) first[k] = g[k];
  for (int k = 0; k < kTile; ++k) m[k] ^= 1;
  for (int k = 0; k < kTile; ++k) v[k] ^= 1;
  if (W == kSplit) {
    uint16_t* low = static_cast<uint16_t*>(a.remainder);
    for (int k = 0; k < kTile; ++k) low[k] ^= 1;
  }
  for (int k = 0; k < kTile; ++k) p[k] ^= 1;
  if (a.out_type == kNone) return;
  uint16_t* out = static_cast<uint16_t*>(a.out);
  if (a.stream) {
    STREAM(out, first);
    STREAM(out + kTile / 2, first + kTile / 2);
  } else {
    for (int k = 0; k < kTile; ++k) out[k] = first[k];
  }
}

// Whole tiles only, a 16-bit gradient, an `out` of 16 bits or none.
template <Type W, Type M>
TARGET static void touch_pass(Arrays a, int64_t numel) {
  a.stream = streams(a);
  for (; numel >= kTile; numel -= kTile) {
    prefetch_tile<kBf16, W, M>(a);
    touch_tile<kBf16, W, M>(a);
    a.advance(kTile);
  }
}

TARGET static void touch(const Arrays& a, int64_t numel) {
  if (a.weight_type == kFp32 && a.moment_type == kFp32) touch_pass<kFp32, kFp32>(a, numel);
  else if (a.weight_type == kFp32) touch_pass<kFp32, kBf16>(a, numel);
  else if (a.moment_type == kFp32) touch_pass<kSplit, kFp32>(a, numel);
  else touch_pass<kSplit, kBf16>(a, numel);
}

// Raises a maximum to the largest absolute value, rounded to bf16. NaN counts as infinity.
TARGET static void raise_maximum(const float* __restrict weights, int64_t numel, float* __restrict maximum) {
  uint32_t largest = as_bits(*maximum);
  for (int64_t k = 0; k < numel; ++k) {
    const uint32_t bits = as_bits(weights[k]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  // Rounding keeps the order, and 16 digits that are 0 stay so.
  *maximum = as_float(largest >= 0x7f800000u ? 0x7f800000u : static_cast<uint32_t>(narrow_bf16(as_float(largest))) << 16);
}

// The codes of e4m3 of weights that are rounded to bf16 and multiplied: to nearest even, at most 448. Adding 2^14 lets
// the hardware round what will be subnormal.
TARGET static void encode(const float* __restrict weights, int64_t numel, float multiplier, uint8_t* __restrict codes) {
  for (int64_t k = 0; k < numel; ++k) {
    const uint32_t bits = as_bits(widen_bf16(narrow_bf16(weights[k])) * multiplier);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t bounded = magnitude > 0x43e00000u ? 0x43e00000u : magnitude;
    const uint32_t normal = (bounded - 0x3c000000u + 0x7ffffu + ((bounded >> 20) & 1u)) >> 20;
    const uint32_t subnormal = as_bits(as_float(bounded) + 16384.0f) - 0x46800000u;
    // Masks, where compilers make branches of choices. A NaN is the code above the largest one.
    const uint32_t is_subnormal = -static_cast<uint32_t>(bounded < 0x3c800000u);
    const uint32_t code = (subnormal & is_subnormal) | (normal & ~is_subnormal) | (magnitude > 0x7f800000u);
    codes[k] = static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
  }
}

// The squares' sums of elements of the first half of a row and those of the second.
template <Type T>
INLINE void square_halves(const void* __restrict first, const void* __restrict second, double* __restrict sums) {
  alignas(64) float low[kTile], high[kTile];
  load<T>(first, low);
  load<T>(second, high);
  for (int k = 0; k < kTile; ++k) {
    const double x = low[k], y = high[k];
    sums[k] = x * x + y * y;
  }
}

template <int kHalf>
INLINE void halve(double* __restrict first, const double* __restrict second) {
  for (int k = 0; k < kHalf; ++k) first[k] += second[k];
}

// The sum of a row's squares: element i of the first half is added to element i of the second until one is left.
template <Type T>
INLINE double square_row(const void* row) {
  const typename Raw<T>::type* raw = static_cast<const typename Raw<T>::type*>(row);
  alignas(64) double sums[kRow / 2];
  for (int k = 0; k < kRow / 2; k += kTile) square_halves<T>(raw + k, raw + k + kRow / 2, sums + k);
  halve<256>(sums, sums + 256);
  halve<128>(sums, sums + 128);
  halve<64>(sums, sums + 64);
  halve<32>(sums, sums + 32);
  halve<16>(sums, sums + 16);
  halve<8>(sums, sums + 8);
  halve<4>(sums, sums + 4);
  halve<2>(sums, sums + 2);
  return sums[0] + sums[1];
}

template <Type T>
TARGET static void square_rows(const void* array, int64_t numel, double* row_sums) {
  const char* row = static_cast<const char*>(array);
  for (; numel >= kRow; numel -= kRow, row += kRow * size_of(T)) {
    for (int64_t byte = 0; byte < kRow * size_of(T); byte += 64) {
      __builtin_prefetch(row + 2 * kRow * size_of(T) + byte, 0);
    }
    *row_sums++ = square_row<T>(row);
  }
  if (numel != 0) {
    alignas(64) unsigned char padded[kRow * 4] = {};
    __builtin_memcpy(padded, row, numel * size_of(T));
    *row_sums = square_row<T>(padded);
  }
}

TARGET static void squares(const void* array, Type type, int64_t numel, double* row_sums) {
  switch (type) {
    case kFp32: return square_rows<kFp32>(array, numel, row_sums);
    case kBf16: return square_rows<kBf16>(array, numel, row_sums);
    default: return square_rows<kFp16>(array, numel, row_sums);
  }
}

}  // namespace BODY

#undef BODY
#undef TARGET
#undef STREAM
#undef FMA
#undef INLINE
