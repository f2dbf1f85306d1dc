// The arithmetic on a range of elements, for one instruction set. Included once for each, without include guards, with
//   BODY         the namespace
//   TARGET       the attribute that lets the compiler use the instruction set
//   STREAM(d, s) copies a 64-byte line from aligned `s` to aligned `d` past the caches
//   LANES        the floats of a vector register
//   SIMD(f, a, b) the intrinsic f of integer vectors; not defined where there is none
//   FMA(a, b, c) a * b + c, rounded once, of vectors
//   SQRT(a)      square roots of a vector
// defined. Functions of the standard library must not be called: the linker could take the copy made here for all.
//
// The update is written in vectors of the compiler: loops over arrays that it would have to vectorise were half as fast.
// An element's result depends on its values alone, so all bodies give the same bits.

#define INLINE TARGET static inline __attribute__((always_inline))

namespace BODY {

// A vector register of each type.
using Floats = float __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Signed = int32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));
using SignedHalves = int16_t __attribute__((vector_size(2 * LANES)));

template <class To, class From>
INLINE To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To bits;
  __builtin_memcpy(&bits, &value, sizeof(To));
  return bits;
}

template <class V>
INLINE V read(const void* from) {
  V values;
  __builtin_memcpy(&values, from, sizeof(V));
  return values;
}

template <class V>
INLINE void write(void* to, V values) { __builtin_memcpy(to, &values, sizeof(V)); }

// The same number in all lanes: subtracting zero keeps its sign if it is a zero.
INLINE Floats splat(float value) { return value - Floats{}; }

// All lanes' bits where a word is that of a NaN. Words without the sign compare as signed ones, which is an instruction.
INLINE Words is_nan(Words bits) { return as<Words>(as<Signed>(bits & 0x7fffffffu) > 0x7f800000); }

// Words that are bf16 numbers; they may be scalars.
template <class F, class W>
INLINE F widen_bf16(W half) { return as<F>(static_cast<W>(half << 16)); }

// To nearest even; a NaN stays one, whatever its payload.
INLINE Words narrow_bf16(Floats value) {
  const Words bits = as<Words>(value), nan = is_nan(bits);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (rounded & ~nan) | (0x7fc0u & nan);
}

// Words that are fp16 numbers; they may be scalars. Subnormal halves are multiples of 2^-24, the distance of floats just
// above 0.5: as such they are read exactly.
template <class F, class W>
INLINE F widen_fp16(W half) {
  const W sign = (half & 0x8000u) << 16;
  const W magnitude = half & 0x7fffu;
  const W normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const W subnormal = as<W>(static_cast<F>(as<F>(static_cast<W>(magnitude | 0x3f000000u)) - 0.5f));
  return as<F>(static_cast<W>(sign | (magnitude < 0x0400u ? subnormal : normal)));
}

// To nearest even. Adding 0.5 lets the hardware round what will be subnormal.
INLINE Words narrow_fp16(Floats value) {
  const Words bits = as<Words>(value);
  const Words magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words subnormal = as<Words>(as<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  const Words finite = magnitude < 0x38800000u ? subnormal : normal;
  const Words special = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  return ((bits >> 16) & 0x8000u) | (magnitude >= 0x477ff000u ? special : finite);
}

template <Type T>
INLINE const void* at(const void* array, int first) { return static_cast<const typename Raw<T>::type*>(array) + first; }

template <Type T>
INLINE void* at(void* array, int first) { return static_cast<typename Raw<T>::type*>(array) + first; }

template <Type T>
INLINE Floats load(const void* from) {
  if (T == kFp32) return read<Floats>(from);
  const Words halves = __builtin_convertvector(read<Halves>(from), Words);
  return T == kBf16 ? widen_bf16<Floats>(halves) : widen_fp16<Floats>(halves);
}

INLINE void write_halves(Words halves, void* to) { write(to, __builtin_convertvector(halves, Halves)); }

template <Type T>
INLINE void store(Floats values, void* to) {
  if (T == kFp32) write(to, values);
  else write_halves(T == kBf16 ? narrow_bf16(values) : narrow_fp16(values), to);
}

// The integer sum of the bf16 weight's bits, shifted, and the signed remainder is the fp32 weight's bits.
INLINE Floats load_split(const void* high, const void* low) {
  const Words shifted = __builtin_convertvector(read<Halves>(high), Words) << 16;
  return as<Floats>(shifted + as<Words>(__builtin_convertvector(read<SignedHalves>(low), Signed)));
}

INLINE void store_split(Floats values, void* high, void* low) {
  const Words all = as<Words>(values), nan = is_nan(all);
  const Words bits = (all & ~nan) | (0x7fc00000u & nan);
  write_halves((bits + 0x8000u) >> 16, high);
  write_halves(bits & 0xffffu, low);
}

// New weights, which are at `weight` already, at `out`; 16-bit ones that are to be streamed at `narrow`.
template <Type W>
INLINE void store_out(Floats p, const Arrays& a, int first, uint16_t* narrow) {
  if (a.out_type == kNone) return;
  if (a.out_type == kFp32) return store<kFp32>(p, at<kFp32>(a.out, first));
  void* const to = a.stream ? narrow + first : at<kBf16>(a.out, first);
  if (a.out_type == kFp16) store<kFp16>(p, to);
  else if (W == kSplit) write(to, read<Halves>(at<W>(a.weight, first)));
  else store<kBf16>(p, to);
}

INLINE void update(const Scalars& s, Floats g, Floats& p, Floats& m, Floats& v) {
  g = g * s.grad_scale;
  if (s.l2 != 0.0f) g = FMA(splat(s.l2), p, g);
  m = FMA(splat(s.lerp), g - m, s.lerp_from_grad ? g : m);
  v = FMA(s.square * g, g, v * s.beta2);
  const Floats denominator = SQRT(v) / s.sqrt_correction2 + s.eps;
  p = p * s.decay + s.minus_step_size * m / denominator;
}

// A part of a tile's old values, bit by bit.
template <Type T>
INLINE void log_array(const void* array, int first, void* values, int k) {
  if (T == kFp32) write(at<T>(values, k), read<Words>(at<T>(array, first + k)));
  else write(at<T>(values, k), read<Halves>(at<T>(array, first + k)));
}

// What the update of elements from first + k on writes over, into the slot of the tile that starts at `first`.
template <Type G, Type W, Type M>
INLINE void log_part(const Arrays& a, bool keeps_grad, int64_t* slot, int first, int k) {
  log_array<W>(a.weight, first, TileLog::values(slot, 0), k);
  log_array<M>(a.exp_avg, first, TileLog::values(slot, 1), k);
  log_array<M>(a.exp_avg_sq, first, TileLog::values(slot, 2), k);
  if (keeps_grad) log_array<G>(a.grad, first, TileLog::values(slot, 3), k);
}

template <Type T>
INLINE Words bits_of(const void* from) {
  if (T == kFp32) return read<Words>(from);
  return __builtin_convertvector(read<Halves>(from), Words);
}

// A part of the sum of a chunk, by the bits of elements: see `chunk_sum` in kept_updates.py. Words may be scalars.
template <class W>
INLINE W sum_part(W weight, W exp_avg, W exp_avg_sq, W place) {
  const W all = weight + (exp_avg << 1) + exp_avg + (exp_avg_sq << 2) + exp_avg_sq;
  return (all ^ (all >> 15)) * ((place << 1) + 1u);
}

// The sum of a tile, from place `first` of its chunk on.
template <Type W, Type M>
INLINE Words sum_tile(const Arrays& a, int64_t first) {
  Words place = read<Words>(kCount) + static_cast<uint32_t>(first), sum{};
  for (int k = 0; k < kTile; k += LANES, place += LANES) {
    const Words m = bits_of<M>(at<M>(a.exp_avg, k)), v = bits_of<M>(at<M>(a.exp_avg_sq, k));
    sum += sum_part<Words>(bits_of<W>(at<W>(a.weight, k)), m, v, place);
  }
  return sum;
}

// One tile: 64 elements at the arrays' beginnings. Those of the next tile are kept if there is a slot for them.
template <Type G, Type W, Type M, bool kLogs>
INLINE void adam_tile(const Scalars& s, const Arrays& a, const TileLog& log) {
  alignas(64) uint16_t narrow[kTile];
  for (int k = 0; k < kTile; k += LANES) {
    if (kLogs) log_part<G, W, M>(a, log.keeps_grad, log.next, kTile, k);
    Floats p = W == kSplit ? load_split(at<W>(a.weight, k), at<W>(a.remainder, k)) : load<W>(at<W>(a.weight, k));
    Floats m = load<M>(at<M>(a.exp_avg, k)), v = load<M>(at<M>(a.exp_avg_sq, k));
    update(s, load<G>(at<G>(a.grad, k)), p, m, v);
    store<M>(m, at<M>(a.exp_avg, k));
    store<M>(v, at<M>(a.exp_avg_sq, k));
    if (W == kSplit) store_split(p, at<W>(a.weight, k), at<W>(a.remainder, k));
    else store<W>(p, at<W>(a.weight, k));
    store_out<W>(p, a, k, narrow);
  }
  if (a.stream) {
    STREAM(static_cast<uint16_t*>(a.out), narrow);
    STREAM(static_cast<uint16_t*>(a.out) + kTile / 2, narrow + kTile / 2);
  }
}

// A tile of old values, bit by bit.
template <Type T>
INLINE void keep(const void* from, void* to, bool stream) {
  char* const bytes = static_cast<char*>(to);
  const char* const old = static_cast<const char*>(from);
  if (stream) {
    alignas(64) char tile[kTile * 4];
    __builtin_memcpy(tile, old, kTile * size_of(T));
    for (int k = 0; k < kTile * size_of(T); k += 64) STREAM(bytes + k, tile + k);
  } else {
    for (int k = 0; k < kTile * size_of(T); k += 4 * LANES) write(bytes + k, read<Words>(old + k));
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
    if (from.log != nullptr) {
      int64_t* const slot = from.log->slot;
      TileLog::invalidate(slot);
      __builtin_memcpy(TileLog::values(slot, 0), from.weight, numel * size_of(from.weight_type));
      __builtin_memcpy(TileLog::values(slot, 1), from.exp_avg, numel * size_of(from.moment_type));
      __builtin_memcpy(TileLog::values(slot, 2), from.exp_avg_sq, numel * size_of(from.moment_type));
      __builtin_memcpy(TileLog::values(slot, 3), from.grad, numel * size_of(from.grad_type));
      from.log->commit(numel);
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
    filled.log = nullptr;
    filled.codes = nullptr;
    filled.stream = false;
    return filled;
  }

  TARGET void empty(const Arrays& to, int64_t numel) const {
    __builtin_memcpy(to.weight, weight, numel * size_of(to.weight_type));
    __builtin_memcpy(to.exp_avg, exp_avg, numel * size_of(to.moment_type));
    __builtin_memcpy(to.exp_avg_sq, exp_avg_sq, numel * size_of(to.moment_type));
    if (to.weight_type == kSplit) __builtin_memcpy(to.remainder, remainder, numel * 2);
    if (to.out_type != kNone) __builtin_memcpy(to.out, out, numel * size_of(to.out_type));
    if (to.log == nullptr) return;
    const auto bits = [](const unsigned char* array, int64_t k, Type type) {
      uint32_t word = 0;
      __builtin_memcpy(&word, array + k * size_of(type), size_of(type));
      return word;
    };
    for (int64_t k = 0; k < numel; ++k) {
      const uint32_t m = bits(exp_avg, k, to.moment_type), v = bits(exp_avg_sq, k, to.moment_type);
      to.log->sum += sum_part(bits(weight, k, to.weight_type), m, v, static_cast<uint32_t>(to.log->start + k));
    }
    to.log->end(numel);
  }
};

// Absolute values rounded to bf16, if none is a NaN.
INLINE Floats round_to_bf16(Words magnitude) {
  return as<Floats>((magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) & 0xffff0000u);
}

// The codes of e4m3 of absolute values up to kRoundsDown, to nearest even: the upper half has an exponent, the lower one
// the steps above it. Adding 2^23 steps lets the hardware round. Below 2^-6, steps do not become smaller.
INLINE Words code_of(Floats value) {
  const Signed exponent = as<Signed>(value) & 0x7f800000;
  const Signed bounded = exponent > 0x3c800000 ? exponent : Signed{} + 0x3c800000;
  return as<Words>(static_cast<Floats>(value + as<Floats>(static_cast<Signed>(bounded + 0x0a000000))));
}

// The same of values of any size. A NaN is the code above the largest one.
INLINE Words bounded_code_of(Floats value) {
  const Words bits = as<Words>(value), nan = is_nan(bits);
  const Words bounded = as<Signed>(bits) > 0x43e00000 ? Words{} + 0x43e00000u : bits;
  return (code_of(as<Floats>(bounded)) & ~nan) | (0x4680007fu & nan);
}

// Writes the codes of four vectors, and the signs that their weights have.
INLINE void write_codes(const Words* code, const Words* weights, uint8_t* to) {
#if defined(SIMD)
  using Pairs = uint16_t __attribute__((vector_size(4 * LANES)));
  Words pairs[2];
  for (int k = 0; k < 2; ++k) {
    // Sixteen times the steps and the exponent's upper half, of which 0x4680 is the least.
    const Words ratio = Words{} + 0x00010010u;
    const Words first = SIMD(madd_epi16, code[2 * k], ratio), second = SIMD(madd_epi16, code[2 * k + 1], ratio);
    const Words both = SIMD(packs_epi32, first, second);
    pairs[k] = as<Words>(static_cast<Pairs>((as<Pairs>(both) - 0x4680) >> 4));
  }
  const Words signs =
      SIMD(packs_epi16, SIMD(packs_epi32, weights[0], weights[1]), SIMD(packs_epi32, weights[2], weights[3]));
  const Words bytes = SIMD(packus_epi16, pairs[0], pairs[1]) | (signs & 0x80808080u);
  // Each 128 bits have a part of all vectors.
  Words order{};
  for (int k = 0; k < LANES; ++k) order[k] = k % (LANES / 4) * 4 + k / (LANES / 4);
  write(to, __builtin_shuffle(bytes, order));
#else
  using Bytes = uint8_t __attribute__((vector_size(LANES)));
  for (int k = 0; k < 4; ++k) {
    const Words bytes = (code[k] & 0xffu) + ((code[k] - 0x46800000u) >> 20) + (weights[k] >> 24 & 0x80u);
    write(to + k * LANES, __builtin_convertvector(bytes, Bytes));
  }
#endif
}

INLINE void raise_largest(const float* weights, int32_t* largest) {
  Signed lanes = read<Signed>(largest);
  for (int k = 0; k < kGroup; k += LANES) {
    // Words without the sign compare as signed ones.
    const Signed magnitude = read<Signed>(weights + k) & 0x7fffffff;
    lanes = magnitude > lanes ? magnitude : lanes;
  }
  write(largest, lanes);
}

// The maxima of one tile of 64 new weights, and 64 codes.
template <bool kFits>
INLINE void code_tile(const float* weights, const RowCodes& row) {
  if (row.largest != nullptr) {
    for (int k = 0; k < kTile / kGroup; ++k) raise_largest(weights + k * kGroup, row.largest[k]);
  }
  if (row.codes == nullptr) return;
  alignas(64) uint8_t codes[kTile];
  for (int first = 0; first < kTile; first += 4 * LANES) {
    Words words[4], code[4];
    for (int k = 0; k < 4; ++k) {
      const int place = first + k * LANES;
      words[k] = read<Words>(weights + place - row.lag);
      const Words magnitude = words[k] & 0x7fffffffu;
      const float multiplier = row.multipliers[place / kGroup];
      if (kFits) code[k] = code_of(round_to_bf16(magnitude) * multiplier);
      else code[k] = bounded_code_of(widen_bf16<Floats>(narrow_bf16(as<Floats>(magnitude))) * multiplier);
    }
    write_codes(code, words, codes + first);
  }
  if (reinterpret_cast<uintptr_t>(row.codes) % 64 == 0) STREAM(row.codes, codes);
  else __builtin_memcpy(row.codes, codes, kTile);
}

// Those of fewer weights.
template <bool kFits>
TARGET static void code_tail(const float* weights, int64_t numel, const RowCodes& row) {
  alignas(64) float padded[2][kTile] = {};
  alignas(64) uint8_t codes[kTile];
  __builtin_memcpy(padded[1], weights, numel * 4);
  if (row.codes != nullptr) __builtin_memcpy(padded[0], weights - row.lag, numel * 4);
  code_tile<kFits>(padded[1], {row.codes == nullptr ? nullptr : codes, row.multipliers, row.largest, kTile, 0});
  if (row.codes != nullptr) __builtin_memcpy(row.codes, codes, numel);
}

template <Type G, Type W, Type M>
INLINE void coded_tiles(const Scalars& s, Arrays a, int64_t numel, RowCodes row) {
  a.out_type = kNone;
  a.stream = false;
  if (numel == 0) return;
  for (int64_t done = 0; done < numel; done += kTile, a.advance(kTile)) {
    a.ahead = kPrefetch + (numel - done > kPrefetch ? 0 : row.gap);
    prefetch_tile<G, W, M>(a);
    if (a.undo_weight != nullptr) keep_tile<W, M>(a);
    adam_tile<G, W, M, false>(s, a, TileLog{});
    // Not those of this tile, which are still being divided.
    if (done != 0) {
      code_tile<true>(static_cast<const float*>(a.weight) - kTile, row);
      row.advance(kTile);
    }
  }
  code_tile<true>(static_cast<const float*>(a.weight) - kTile, row);
}

template <Type G, Type W, Type M>
INLINE void logged_tiles(const Scalars& s, Arrays a, int64_t numel, TileLog& shared) {
  if (numel == 0) return;
  TileLog log = shared;
  TileLog::invalidate(log.slot);
  Words sum{};
  for (int k = 0; k < kTile; k += LANES) log_part<G, W, M>(a, log.keeps_grad, log.slot, 0, k);
  for (int64_t done = kTile; done < numel; done += kTile, a.advance(kTile)) {
    prefetch_tile<G, W, M>(a);
    log.commit(kTile);
    TileLog::invalidate(log.next);
    adam_tile<G, W, M, true>(s, a, log);
    sum += sum_tile<W, M>(a, log.start);
    log.end(kTile);
  }
  log.commit(kTile);
  adam_tile<G, W, M, false>(s, a, log);
  sum += sum_tile<W, M>(a, log.start);
  for (int lane = 0; lane < LANES; ++lane) log.sum += sum[lane];
  log.end(kTile);
  shared = log;
}

template <Type G, Type W, Type M>
TARGET __attribute__((noinline)) static void whole_tiles(const Scalars& scalars, Arrays a, int64_t numel) {
  const Scalars s = scalars;
  a.grad_type = G;  // known to the compiler from here on
  a.weight_type = W;
  a.moment_type = M;
  if (a.log != nullptr) return logged_tiles<G, W, M>(s, a, numel, *a.log);
  if (W == kFp32 && a.codes != nullptr) return coded_tiles<G, W, M>(s, a, numel, *a.codes);
  for (int64_t done = 0; done < numel; done += kTile, a.advance(kTile)) {
    prefetch_tile<G, W, M>(a);
    if (a.undo_weight != nullptr) keep_tile<W, M>(a);
    adam_tile<G, W, M, false>(s, a, TileLog{});
  }
}

// Elements before the first cache line, unless groups with a scale begin with the first element, and behind the last
// whole tile go through a padded copy: every element sees the same instructions.
template <Type G, Type W, Type M>
TARGET static void pass(const Scalars& s, Arrays a, int64_t numel) {
  Padded padded;
  const int64_t head = a.codes != nullptr ? 0 : elements_before_line(a, numel);
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
    if (W == kFp32 && a.codes != nullptr) {
      RowCodes row = *a.codes;
      row.advance(body);
      code_tail<true>(static_cast<const float*>(a.weight), tail, row);
    }
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

// Raises the maxima of tiles, rounded to bf16, to what was found of their groups. NaN counts as infinity.
TARGET static void raise_maxima(const int32_t (*largest)[kMostLanes], int64_t numel, int64_t tile, float* maxima) {
  const int64_t size = num_tiles(tile, kGroup);
  for (int64_t first = 0, groups = num_tiles(numel, kGroup); first < groups; first += size, ++maxima) {
    Signed lanes{};
    for (int64_t group = first; group < groups && group < first + size; ++group) {
      const Signed found = read<Signed>(largest[group]);
      lanes = found > lanes ? found : lanes;
    }
    int32_t all = 0;
    for (int lane = 0; lane < LANES; ++lane) all = lanes[lane] > all ? lanes[lane] : all;
    // Rounding keeps the order.
    const float bounded = as<float>(all > 0x7f800000 ? 0x7f800000 : all);
    const float maximum = as<float>(narrow_bf16(splat(bounded))[0] << 16);
    *maxima = maximum > *maxima ? maximum : *maxima;
  }
}

template <bool kFits>
INLINE void encode_row(const float* weights, int64_t numel, RowCodes row) {
  for (; numel >= kTile; numel -= kTile, weights += kTile, row.advance(kTile)) code_tile<kFits>(weights, row);
  if (numel != 0) code_tail<kFits>(weights, numel, row);
}

// Codes of weights again. If all fit, they are finite, and no value is rounded to more than 448.
TARGET static void encode(const float* weights, int64_t numel, const RowCodes& row, bool all_fit) {
  if (all_fit) encode_row<true>(weights, numel, row);
  else encode_row<false>(weights, numel, row);
}

template <Type T>
INLINE void load_tile(const void* __restrict from, float* __restrict tile) {
  for (int k = 0; k < kTile; k += LANES) write(tile + k, load<T>(at<T>(from, k)));
}

// The squares' sums of elements of the first half of a row and those of the second.
template <Type T>
INLINE void square_halves(const void* __restrict first, const void* __restrict second, double* __restrict sums) {
  alignas(64) float low[kTile], high[kTile];
  load_tile<T>(first, low);
  load_tile<T>(second, high);
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
#undef LANES
#undef SIMD
#undef FMA
#undef SQRT
#undef INLINE
