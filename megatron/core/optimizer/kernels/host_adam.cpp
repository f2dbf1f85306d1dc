// Adam over flat arrays in host memory, the codes of new weights, and squared norms, on a pool of threads. No torch, no
// Python.
//
// adam.py says what is computed ([Note: arithmetic], [Note: remainder]), torch_adam.py in which order squares are added
// ([Note: squares in fp64]), host_adam.py mirrors the structs below. Compile with -O3 -ffp-contract=off
// -fno-math-errno: every rounding is then where the source shows it, and square roots are instructions.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kTile = 64;                   // elements that are prefetched and streamed together
constexpr int64_t kPrefetch = 512;          // elements ahead of which memory is asked for
constexpr int kRow = 1024;                  // elements whose squares are added first
constexpr int64_t kMinChunk = 16 * 1024;    // elements a thread takes at a time, at least
constexpr int64_t kMaxChunk = 128 * 1024;   // and at most; both multiples of kRow
constexpr int64_t kSlotHeader = 8;          // numbers before the old values of a row
constexpr int64_t kCodeRows = 128;          // rows of a matrix, about, that a thread takes at a time to make codes
constexpr int64_t kCodeColumns = 8192;      // and columns: short rows are slow
constexpr int64_t kGroup = 32;              // elements of a row that share a scale, also of the narrowest tile
constexpr int kMostLanes = 16;              // floats of the widest vector register
constexpr float kLargest = 448.0f;          // value of e4m3
constexpr float kRoundsDown = 464.0f;       // the largest float that is rounded to it

alignas(64) constexpr uint32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

enum Type : int32_t { kNone = 0, kFp32 = 1, kBf16 = 2, kFp16 = 3, kSplit = 4 };
enum ScaleKind : int32_t { kAnyFp32 = 0, kPowerOfTwo = 1, kE8M0 = 2, kOneScale = 3 };

// Each is rounded to fp32 once, from fp64.
struct Scalars {
  float grad_scale;
  float l2;               // 0: none
  float decay;            // 1 - lr * weight_decay, 1: none
  float lerp;             // 1 - beta1, or -beta1 from the gradient's side
  float square;           // 1 - beta2
  float beta2;
  float minus_step_size;  // -lr / correction1
  float sqrt_correction2;
  float eps;
  int32_t lerp_from_grad;
};

struct TileLog;
struct RowCodes;

struct Arrays {
  const void* grad;
  void* weight;
  void* exp_avg;
  void* exp_avg_sq;
  void* remainder;  // beside a weight of kSplit only
  void* out;
  void* undo_weight;  // old values are copied there, and to the next two; null: they are not kept
  void* undo_exp_avg;
  void* undo_exp_avg_sq;
  Type grad_type, weight_type, moment_type, out_type;
  int32_t stream;        // set here: whether `out` is written past the caches
  int32_t streams_undo;  // the same of old values
  TileLog* log;          // set here; null: a killed process leaves any elements half written
  const RowCodes* codes;  // also set here, for fp32 weights; null: they get none
  int64_t ahead;         // elements ahead of which memory is asked for, also set here

  inline __attribute__((always_inline)) void advance(int64_t numel);
};

// How the new weights, rows of a matrix or of several below each other, become codes of e4m3: WeightQuantizer in
// scaling.py. Each tile of `tile_rows` x `tile_columns` has a maximum and a scale. With kOneScale a tile is a matrix and
// its scale, any fp32, is computed from `last_maxima`, not from the maximum that a pass finds.
struct Codes {
  uint8_t* codes;        // null: none are made
  float* maxima;         // of all tiles; written, of this piece's rows, by a pass, and only read by an encoding
  const float* last_maxima;  // of all tiles, of an earlier pass, or zeros
  int64_t first_row;     // number of the piece's first row
  int64_t columns;
  int64_t matrix_rows;   // of one of the matrices, which have tiles of their own
  int64_t tile_rows;
  int64_t tile_columns;
  ScaleKind kind;
  float largest;         // what the maximum of a tile is scaled to
};

}  // namespace

struct HostAdamPiece {
  Arrays arrays;
  Scalars scalars;
  int64_t numel;
  int64_t first_chunk;  // with a log: the number of the piece's first chunk in the bucket
  Codes codes;
};

// Where old values are kept of tiles that are being updated, and numbers that say which; kept_updates.py restores them.
struct HostAdamLog {
  char* slots;          // two for each thread: a header, and room for four tiles of fp32
  int64_t slot_bytes;
  int64_t chunk;        // elements of a chunk
  int64_t* counters;    // elements that are done of each chunk of the bucket
  int64_t counter_stride;  // numbers from one counter to the next: threads should not share cache lines
  int64_t* sums;        // of each chunk; that of new values is added before its counter gets full
  int64_t step, bucket;
};

namespace {

constexpr int64_t size_of(Type type) { return type == kFp32 ? 4 : type == kNone ? 0 : 2; }

template <Type T> struct Raw { using type = uint16_t; };
template <> struct Raw<kFp32> { using type = uint32_t; };

inline __attribute__((always_inline)) uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline __attribute__((always_inline)) float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

void Arrays::advance(int64_t numel) {
  grad = static_cast<const char*>(grad) + numel * size_of(grad_type);
  weight = static_cast<char*>(weight) + numel * size_of(weight_type);
  exp_avg = static_cast<char*>(exp_avg) + numel * size_of(moment_type);
  exp_avg_sq = static_cast<char*>(exp_avg_sq) + numel * size_of(moment_type);
  remainder = static_cast<char*>(remainder) + (weight_type == kSplit ? numel * 2 : 0);
  out = static_cast<char*>(out) + numel * size_of(out_type);
  if (undo_weight == nullptr) return;
  undo_weight = static_cast<char*>(undo_weight) + numel * size_of(weight_type);
  undo_exp_avg = static_cast<char*>(undo_exp_avg) + numel * size_of(moment_type);
  undo_exp_avg_sq = static_cast<char*>(undo_exp_avg_sq) + numel * size_of(moment_type);
}

// Elements, of `numel`, up to where a cache line begins in `out`, or in the weights where there is none.
inline __attribute__((always_inline)) int64_t elements_before_line(const Arrays& a, int64_t numel) {
  const bool has_out = a.out_type != kNone;
  const uintptr_t address = reinterpret_cast<uintptr_t>(has_out ? a.out : a.weight);
  return std::min(numel, static_cast<int64_t>(-address % 64) / size_of(has_out ? a.out_type : a.weight_type));
}

// Whether to write `out` past the caches: not where it lies over the gradient, whose lines are in the caches already.
inline __attribute__((always_inline)) bool streams(const Arrays& a) {
  return a.out != a.grad && size_of(a.out_type) == 2 && reinterpret_cast<uintptr_t>(a.out) % 64 == 0;
}

// Whether to write old values past the caches: nobody reads them, unless the step is undone.
inline __attribute__((always_inline)) bool streams_undo(const Arrays& a) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(a.undo_weight) | reinterpret_cast<uintptr_t>(a.undo_exp_avg) |
                        reinterpret_cast<uintptr_t>(a.undo_exp_avg_sq);
  return all % 64 == 0;
}

inline __attribute__((always_inline)) int64_t num_tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// What becomes of a row of new weights, which has a multiplier and maxima for each group of elements.
struct RowCodes {
  uint8_t* codes;  // null: none are made
  const float* multipliers;
  int32_t (*largest)[kMostLanes];  // bits of the largest absolute value in each lane of a vector; null: not looked for
  int64_t lag;                     // codes are made of weights that are so many elements before
  int64_t gap;                     // elements between the end of this row and the next one

  inline __attribute__((always_inline)) void advance(int64_t numel) {
    if (codes != nullptr) codes += numel;
    multipliers += numel / kGroup;
    if (largest != nullptr) largest += numel / kGroup;
  }
};

bool is_finite(float maximum) { return as_bits(maximum) < 0x7f800000u; }

// scale_of and e8m0_of in formats.py: what values are multiplied by, given the maximum of their tile.
float multiplier_of(float maximum, const Codes& codes) {
  if (codes.kind == kE8M0) {
    const uint32_t bits = as_bits(maximum * (1.0f / kLargest));
    uint32_t exponent = bits >> 23;
    const uint32_t mantissa = bits & 0x7fffffu;
    if (mantissa != 0 && exponent < 0xfeu && !(exponent == 0 && mantissa <= 0x400000u)) ++exponent;
    exponent = std::min(exponent, 0xfeu);
    return 1.0f / as_float(exponent == 0 ? 0x400000u : exponent << 23);
  }
  const bool is_usable = maximum > 0.0f && is_finite(maximum);
  const float scale = is_usable ? std::min(codes.largest / maximum, as_float(0x7f7fffffu)) : 1.0f;
  return codes.kind == kPowerOfTwo ? as_float(as_bits(scale) & 0xff800000u) : scale;
}

// The product of two floats is exact in fp64. Its sum with the third, rounded to the nearest double and then to float,
// would be rounded twice; rounded to odd in between, the second rounding is the right one (Boldo and Melquiond,
// "Emulation of a FMA and correctly rounded sums", 2008). An error that is no number is that of an infinite or NaN sum.
inline __attribute__((always_inline)) float fma_in_fp64(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  int64_t bits;
  __builtin_memcpy(&bits, &sum, 8);
  const int64_t inexact = (error > 0.0) | (error < 0.0);
  const int64_t away_from_zero = (error > 0.0) == (sum > 0.0);
  bits += (inexact & ~bits & 1) * (2 * away_from_zero - 1);
  double odd;
  __builtin_memcpy(&odd, &bits, 8);
  return static_cast<float>(odd);
}

template <class Floats>
inline __attribute__((always_inline)) Floats fma_lanes(Floats a, Floats b, Floats c) {
  Floats result;
  for (int lane = 0; lane < 4; ++lane) {
#if defined(__FP_FAST_FMAF)
    result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
#else
    result[lane] = fma_in_fp64(a[lane], b[lane], c[lane]);
#endif
  }
  return result;
}

template <class Floats>
inline __attribute__((always_inline)) Floats sqrt_lanes(Floats values) {
  for (int lane = 0; lane < 4; ++lane) values[lane] = __builtin_sqrtf(values[lane]);
  return values;
}

// Old values of the tile that a thread updates, so that a process that is killed leaves no element whose old or new value
// is unknown. A thread has two slots, which stay in the first cache: while it updates a tile, it fills the other slot with
// the next tile's. A killed thread has made its stores up to some place of the program, so that only the compiler must
// keep their order.
struct TileLog {
  int64_t* slot;  // of the coming tile
  int64_t* next;
  int64_t* counter;  // elements of the chunk that are done
  int64_t step, start;
  int64_t numel;    // of the chunk
  int64_t* total;   // the chunk's sum
  bool keeps_grad;  // `out` lies over it
  uint32_t sum;     // of the elements that this thread has updated

  // Before old values are written to a slot, which is not valid meanwhile.
  static inline __attribute__((always_inline)) void invalidate(int64_t* slot) {
    slot[0] = 0;
    order();
  }

  // Once the coming tile's old values are in `slot`.
  inline __attribute__((always_inline)) void commit(int64_t numel) const {
    slot[3] = start;
    slot[4] = numel;
    order();
    slot[0] = step;
    order();
  }

  // Once the tile has been updated.
  inline __attribute__((always_inline)) void end(int64_t numel) {
    start += numel;
    if (start == this->numel) *total = static_cast<uint32_t>(*total + sum);
    order();
    *counter = start;
    order();
    int64_t* const before = slot;
    slot = next;
    next = before;
  }

  static inline __attribute__((always_inline)) void* values(int64_t* slot, int array) {
    return reinterpret_cast<char*>(slot + kSlotHeader) + array * kTile * 4;
  }

 private:
  static inline __attribute__((always_inline)) void order() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
};

}  // namespace

#if defined(__x86_64__)

#define BODY avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#define STREAM(to, from) \
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(reinterpret_cast<const __m512i*>(from)))
#define LANES 16
#define SIMD(name, a, b) \
  reinterpret_cast<Words>(_mm512_##name(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)))
#define FMA(a, b, c) reinterpret_cast<Floats>(_mm512_fmadd_ps(a, b, c))
#define SQRT(a) reinterpret_cast<Floats>(_mm512_maskz_sqrt_ps(0xffff, a))
#include "host_adam_body.h"

#define BODY avx2
#define TARGET __attribute__((target("avx2,fma")))
#define STREAM(to, from)                                                                                            \
  for (int part = 0; part < 2; ++part)                                                                              \
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + part,                                                        \
                      _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + part))
#define LANES 8
#define SIMD(name, a, b) \
  reinterpret_cast<Words>(_mm256_##name(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)))
#define FMA(a, b, c) reinterpret_cast<Floats>(_mm256_fmadd_ps(a, b, c))
#define SQRT(a) reinterpret_cast<Floats>(_mm256_sqrt_ps(a))
#include "host_adam_body.h"

#define STREAM(to, from)                                                                                            \
  for (int part = 0; part < 4; ++part)                                                                              \
  _mm_stream_si128(reinterpret_cast<__m128i*>(to) + part, _mm_load_si128(reinterpret_cast<const __m128i*>(from) + part))
#define SIMD(name, a, b) \
  reinterpret_cast<Words>(_mm_##name(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)))

#else

#define STREAM(to, from) __builtin_memcpy(to, from, 64)

#endif

#define BODY baseline
#define TARGET
#define LANES 4
#define FMA(a, b, c) fma_lanes<Floats>(a, b, c)
#define SQRT(a) sqrt_lanes<Floats>(a)
#include "host_adam_body.h"

namespace {

enum Body : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

bool has_body(int32_t body) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (body == kAvx2) return avx2;
  if (body == kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return body == kBaseline;
}

// Calls a function of a body, which the caller has found to be there.
#if defined(__x86_64__)
#define ON_BODY(body, ...) \
  if (body == kAvx512) return avx512::__VA_ARGS__; \
  if (body == kAvx2) return avx2::__VA_ARGS__; \
  return baseline::__VA_ARGS__
#else
#define ON_BODY(body, ...) return (void)(body), baseline::__VA_ARGS__
#endif

void adam(int32_t body, const Scalars& scalars, const Arrays& arrays, int64_t numel) {
  ON_BODY(body, adam(scalars, arrays, numel));
}

void touch(int32_t body, const Arrays& arrays, int64_t numel) {
  ON_BODY(body, touch(arrays, numel));
}

void raise_maxima(int32_t body, const int32_t (*largest)[kMostLanes], int64_t numel, int64_t tile, float* maxima) {
  ON_BODY(body, raise_maxima(largest, numel, tile, maxima));
}

void encode(int32_t body, const float* weights, int64_t numel, const RowCodes& row, bool all_fit) {
  ON_BODY(body, encode(weights, numel, row, all_fit));
}

void squares(int32_t body, const void* array, Type type, int64_t numel, double* row_sums) {
  ON_BODY(body, squares(array, type, numel, row_sums));
}

// Halves the sums, as if zeros filled them up to a power of two, until one is left.
double sum_halving(std::vector<double>& sums) {
  size_t half = 1;
  while (2 * half < sums.size()) half *= 2;
  for (size_t count = sums.size(); count > 1; half /= 2) {
    for (size_t k = half; k < count; ++k) sums[k - half] += sums[k];
    count = std::min(count, half);
  }
  return sums.empty() ? 0.0 : sums[0];
}

// Subnormals are kept whatever the thread that made this one had set.
void keep_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);
#endif
}

// Makes what was streamed visible to whoever waits.
void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

struct Chunk {
  int64_t piece, start, numel;
};

// The rows and columns of a piece that a chunk of its codes has.
struct Rectangle {
  int64_t row, end_row, column, end_column;
};

// A tile's rows that a piece has, and the number of its first tile. A matrix with one scale has several bands.
struct Band {
  int64_t end_row, tile;
  bool is_whole;
};

// The tiles of a piece's rows from `row` on.
Band band_of(const Codes& codes, int64_t row, int64_t num_rows) {
  const int64_t in_weight = codes.first_row + row;
  const int64_t matrix = in_weight / codes.matrix_rows, in_matrix = in_weight % codes.matrix_rows;
  const int64_t height = codes.kind == kOneScale ? kCodeRows : codes.tile_rows, in_tile = in_matrix % height;
  const int64_t last = row - in_tile + std::min(height, codes.matrix_rows - (in_matrix - in_tile));
  const int64_t number = matrix * num_tiles(codes.matrix_rows, codes.tile_rows) + in_matrix / codes.tile_rows;
  const int64_t across = num_tiles(codes.columns, codes.tile_columns);
  return {std::min(last, num_rows), number * across, in_tile == 0 && last <= num_rows};
}

// At most kCodeColumns of the rows of a band.
class BandPart {
 public:
  // `maxima` and `last_maxima`: of the band's tiles.
  BandPart(int32_t body, const HostAdamPiece& piece, const Rectangle& part, float* maxima, const float* last_maxima)
      : body_(body),
        piece_(piece),
        codes_(piece.codes),
        part_(part),
        width_(part.end_column - part.column),
        maxima_(maxima + part.column / codes_.tile_columns),
        last_maxima_(last_maxima + part.column / codes_.tile_columns) {}

  // Raises maxima. On the way, makes codes of the new weights, if their scales can be guessed, or of the row before, if
  // its maxima are given.
  void step(const float* maxima_before) const {
    float multipliers[kGroups];
    alignas(64) int32_t largest[kGroups][kMostLanes];
    __builtin_memset(largest, 0, num_groups() * sizeof(largest[0]));
    const float* const maxima = guesses() ? last_maxima_ : maxima_before;
    const int64_t lag = guesses() ? 0 : codes_.columns;
    if (maxima != nullptr) fill_multipliers(maxima, multipliers);
    for (int64_t row = part_.row; row < part_.end_row; ++row) {
      const int64_t start = row * codes_.columns + part_.column;
      const RowCodes coded{maxima == nullptr ? nullptr : codes_.codes + start - lag, multipliers, largest, lag,
                           codes_.columns - width_};
      Arrays arrays = piece_.arrays;
      arrays.codes = &coded;
      arrays.advance(start);
      adam(body_, piece_.scalars, arrays, width_);
    }
    raise_maxima(body_, largest, width_, codes_.tile_columns, maxima_);
  }

  // Makes the codes of tiles, but not of those whose scale a step has guessed.
  void encode(bool is_stepped) const {
    float multipliers[kGroups];
    fill_multipliers(codes_.kind == kOneScale ? last_maxima_ : maxima_, multipliers);
    const int64_t size = codes_.tile_columns, tiles = num_tiles(width_, size);
    for (int64_t tile = 0; tile < tiles;) {
      const int64_t first = tile;
      bool all_fit = true;
      for (; tile < tiles && !(is_stepped && is_guessed(tile)); ++tile) all_fit &= fits(tile);
      // The codes around them that are written, too, are there already.
      if (tile > first) encode(multipliers, first * size, std::min(width_, tile * size), all_fit);
      tile += tile == first;
    }
  }

 private:
  static constexpr int64_t kGroups = kCodeColumns / kGroup;

  void encode(const float* multipliers, int64_t column, int64_t end_column, bool all_fit) const {
    const int64_t begin = column / kTile * kTile, end = std::min(width_, num_tiles(end_column, kTile) * kTile);
    for (int64_t row = part_.row; row < part_.end_row; ++row) {
      const int64_t start = row * codes_.columns + part_.column + begin;
      const float* weights = static_cast<const float*>(piece_.arrays.weight) + start;
      const RowCodes coded{codes_.codes + start, multipliers + begin / kGroup, nullptr, 0, 0};
      ::encode(body_, weights, end - begin, coded, all_fit);
    }
  }

  // Few powers of two change from step to step, and nearly all other scales; kOneScale has its scales.
  bool guesses() const { return codes_.kind != kAnyFp32; }

  bool is_guessed(int64_t tile) const {
    if (!guesses() || !fits(tile)) return false;
    return codes_.kind == kOneScale || multiplier(maxima_[tile]) == multiplier(last_maxima_[tile]);
  }

  // Whether the tile's codes need no bound. By the scale of other weights, values may be too large.
  bool fits(int64_t tile) const {
    const float maximum = maxima_[tile];
    return is_finite(maximum) &&
           (codes_.kind != kOneScale || maximum * multiplier(last_maxima_[tile]) <= kRoundsDown);
  }

  float multiplier(float maximum) const { return multiplier_of(maximum, codes_); }

  void fill_multipliers(const float* maxima, float* multipliers) const {
    const int64_t size = num_tiles(codes_.tile_columns, kGroup), tiles = num_tiles(width_, codes_.tile_columns);
    std::fill(multipliers, multipliers + num_groups(), 1.0f);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t end = std::min(num_groups(), (tile + 1) * size);
      std::fill(multipliers + tile * size, multipliers + end, multiplier(maxima[tile]));
    }
  }

  // Of whole tiles of `adam_tile`.
  int64_t num_groups() const { return num_tiles(width_, kTile) * (kTile / kGroup); }

  const int32_t body_;
  const HostAdamPiece& piece_;
  const Codes& codes_;
  const Rectangle part_;
  const int64_t width_;
  float* const maxima_;
  const float* const last_maxima_;
};

// Raises a maximum that other threads raise, too.
void raise_shared(float* maximum, float found) {
  float seen;
  __atomic_load(maximum, &seen, __ATOMIC_RELAXED);
  while (seen < found &&
         !__atomic_compare_exchange(maximum, &seen, &found, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// A step, maxima and codes of the tiles in a rectangle; or, where `encodes_only`, the codes of tiles of which other
// ranks have rows, by maxima that include those. With kOneScale these are all codes, by the last maxima.
void adam_to_codes(int32_t body, const HostAdamPiece& piece, const Rectangle& part, bool encodes_only) {
  const Codes& codes = piece.codes;
  const int64_t num_rows = piece.numel / codes.columns, first_tile = part.column / codes.tile_columns;
  const int64_t end_tile = num_tiles(part.end_column, codes.tile_columns);
  const bool may_lag = codes.kind == kAnyFp32 && codes.tile_rows == 1 && !encodes_only;
  const bool has_one_scale = codes.kind == kOneScale;
  const float* before = nullptr;  // maxima of the row before, whose codes the next step makes
  for (int64_t row = part.row; row < part.end_row;) {
    const Band band = band_of(codes, row, num_rows);
    float found = 0.0f;  // of a band of a matrix, whose other bands other threads may have
    float* const own = has_one_scale && !encodes_only ? &found : codes.maxima + band.tile;
    float *const maxima = own + first_tile, *const end = own + end_tile;
    const auto for_each_part = [&](auto work) {
      for (int64_t column = part.column; column < part.end_column; column += kCodeColumns) {
        const int64_t end_column = std::min(part.end_column, column + kCodeColumns);
        work(BandPart(body, piece, {row, band.end_row, column, end_column}, own, codes.last_maxima + band.tile));
      }
    };
    if (!encodes_only) {
      std::fill(maxima, end, 0.0f);
      for_each_part([&](const BandPart& one) { one.step(before); });
    }
    const bool lags = may_lag && band.end_row < part.end_row && std::all_of(maxima, end, is_finite);
    before = lags ? maxima : nullptr;
    const bool encodes = has_one_scale || band.is_whole != encodes_only;
    if (encodes && !lags) for_each_part([&](const BandPart& one) { one.encode(!encodes_only); });
    if (has_one_scale && !encodes_only) raise_shared(codes.maxima + band.tile, found);
    row = band.end_row;
  }
}

// Work that was submitted, in chunks that any thread may take.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run(const Chunk& chunk, int thread) = 0;

  void finish_chunk() {
    if (unfinished_.fetch_sub(1) != 1) return;
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    is_done_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_done_.wait(lock, [this] { return done_; });
  }

  const std::vector<Chunk>& chunks() const { return chunks_; }
  size_t next = 0;  // the chunk to be taken next; the pool's lock guards it

 protected:
  // The elements of a chunk: several chunks a thread where there are enough elements.
  template <class Lengths>
  static int64_t chunk_of(const Lengths& lengths, int num_threads) {
    int64_t total = 0;
    for (int64_t numel : lengths) total += numel;
    const int64_t wanted = total / (4 * num_threads) / kRow * kRow;
    return std::min(kMaxChunk, std::max(kMinChunk, wanted));
  }

  // Cuts arrays of these lengths into chunks.
  template <class Lengths>
  void cut(const Lengths& lengths, int64_t most) {
    int64_t piece = 0;
    for (int64_t numel : lengths) {
      for (int64_t start = 0; start < numel; start += most) {
        chunks_.push_back({piece, start, std::min(most, numel - start)});
      }
      ++piece;
    }
    unfinished_ = static_cast<int64_t>(chunks_.size());
    done_ = chunks_.empty();
  }

  // Rectangles of whole tiles, before `cut`: a chunk has the first element of one, and as many elements as it has.
  void cut_codes(int64_t number, const HostAdamPiece& piece) {
    const Codes& codes = piece.codes;
    const int64_t num_rows = piece.numel / codes.columns;
    const int64_t width = num_tiles(kCodeColumns, codes.tile_columns) * codes.tile_columns;
    for (int64_t row = 0, end = 0; row < num_rows; row = end) {
      while (end < num_rows && end - row < kCodeRows) end = band_of(codes, end, num_rows).end_row;
      for (int64_t column = 0; column < codes.columns; column += width) {
        const int64_t numel = (end - row) * std::min(width, codes.columns - column);
        chunks_.push_back({number, row * codes.columns + column, numel});
      }
    }
  }

 private:
  std::vector<Chunk> chunks_;
  std::atomic<int64_t> unfinished_{0};
  std::mutex mutex_;
  std::condition_variable is_done_;
  bool done_ = false;
};

enum Mode : int32_t { kStep = 0, kTouch = 1, kEncode = 2 };

class AdamJob : public Job {
 public:
  AdamJob(int32_t body, const HostAdamPiece* pieces, int64_t count, Mode mode, const HostAdamLog* log, int num_threads)
      : body_(body), mode_(mode), pieces_(pieces, pieces + count), logs_(log != nullptr) {
    if (logs_) log_ = *log;
    std::vector<int64_t> lengths;
    for (const HostAdamPiece& piece : pieces_) {
      const bool has_codes = piece.codes.codes != nullptr;
      if (has_codes) cut_codes(static_cast<int64_t>(lengths.size()), piece);
      if (has_codes && piece.codes.kind == kOneScale && mode == kStep) clear_shared(piece);
      lengths.push_back(has_codes ? 0 : piece.numel);
    }
    cut(lengths, logs_ ? log_.chunk : chunk_of(lengths, num_threads));
  }

  void run(const Chunk& chunk, int thread) override {
    const HostAdamPiece& piece = pieces_[chunk.piece];
    if (logs_) return run_logged(piece, chunk, thread);
    if (piece.codes.codes != nullptr) return make_codes(piece, chunk);
    Arrays arrays = piece.arrays;
    arrays.ahead = kPrefetch;
    arrays.advance(chunk.start);
    if (mode_ == kTouch) touch(body_, arrays, chunk.numel);
    else adam(body_, piece.scalars, arrays, chunk.numel);
    finish_streams();
  }

 private:
  // The maxima of matrices of which a piece has rows, which threads will raise.
  static void clear_shared(const HostAdamPiece& piece) {
    const Codes& codes = piece.codes;
    const int64_t end_row = codes.first_row + piece.numel / codes.columns;
    const int64_t first = codes.first_row / codes.matrix_rows, end = num_tiles(end_row, codes.matrix_rows);
    std::fill(codes.maxima + first, codes.maxima + end, 0.0f);
  }

  // From where the chunk's counter is.
  void run_logged(const HostAdamPiece& piece, const Chunk& chunk, int thread) {
    int64_t* slots[2];
    const int64_t number = piece.first_chunk + chunk.start / log_.chunk;
    int64_t* const counter = log_.counters + number * log_.counter_stride;
    *counter = std::max<int64_t>(*counter, 0);
    for (int k = 0; k < 2; ++k) {
      slots[k] = reinterpret_cast<int64_t*>(log_.slots + (2 * thread + k) * log_.slot_bytes);
      TileLog::invalidate(slots[k]);
      slots[k][1] = log_.bucket;
      slots[k][2] = number;
    }
    Arrays arrays = piece.arrays;
    arrays.ahead = kPrefetch;
    int64_t* const total = log_.sums + number;
    const bool keeps_grad = arrays.out == arrays.grad;
    TileLog log{slots[0], slots[1], counter, log_.step, *counter, chunk.numel, total, keeps_grad, 0};
    arrays.advance(chunk.start + log.start);
    arrays.log = &log;
    adam(body_, piece.scalars, arrays, chunk.numel - log.start);
    finish_streams();
  }

  void make_codes(const HostAdamPiece& piece, const Chunk& chunk) {
    const int64_t columns = piece.codes.columns, tile = piece.codes.tile_columns;
    const int64_t row = chunk.start / columns, column = chunk.start % columns;
    const int64_t width = std::min(num_tiles(kCodeColumns, tile) * tile, columns - column);
    adam_to_codes(body_, piece, {row, row + chunk.numel / width, column, column + width}, mode_ == kEncode);
    finish_streams();
  }

  const int32_t body_;
  const Mode mode_;
  const std::vector<HostAdamPiece> pieces_;
  const bool logs_;
  HostAdamLog log_;
};

class NormJob : public Job {
 public:
  NormJob(int32_t body, const void* array, Type type, int64_t numel, int num_threads)
      : body_(body), array_(static_cast<const char*>(array)), type_(type), row_sums_((numel + kRow - 1) / kRow) {
    const std::vector<int64_t> lengths{numel};
    cut(lengths, chunk_of(lengths, num_threads));
  }

  void run(const Chunk& chunk, int) override {
    squares(body_, array_ + chunk.start * size_of(type_), type_, chunk.numel, &row_sums_[chunk.start / kRow]);
  }

  double sum() { return sum_halving(row_sums_); }

 private:
  const int32_t body_;
  const char* const array_;
  const Type type_;
  std::vector<double> row_sums_;
};

}  // namespace

// Threads that take chunks of the oldest job that has any left.
class HostAdamPool {
 public:
  explicit HostAdamPool(int num_threads) {
    try {
      for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {
      close();
      throw;
    }
  }

  ~HostAdamPool() { close(); }

  int num_threads() const { return static_cast<int>(threads_.size()); }

  void submit(std::shared_ptr<Job> job) {
    if (job->chunks().empty()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    has_work_.notify_all();
  }

 private:
  // What was submitted is still finished.
  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work(int thread) {
    keep_subnormals();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      has_work_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      std::shared_ptr<Job> job = jobs_.front();
      const Chunk& chunk = job->chunks()[job->next++];
      if (job->next == job->chunks().size()) jobs_.pop_front();
      lock.unlock();
      job->run(chunk, thread);
      job->finish_chunk();
      job.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

struct HostAdamTicket {
  std::shared_ptr<Job> job;
};

// Nothing below throws; a null pointer or a false says that memory or threads ran out.
extern "C" {

// What host_adam.py expects; raised whenever a struct or a signature changes.
int32_t host_adam_version() { return 5; }

int32_t host_adam_has_body(int32_t body) { return has_body(body); }

HostAdamPool* host_adam_pool_create(int32_t num_threads) {
  try {
    return new HostAdamPool(num_threads);
  } catch (...) {
    return nullptr;
  }
}

// Waits for what was submitted. Not in a forked child: the threads are the parent's.
void host_adam_pool_destroy(HostAdamPool* pool) { delete pool; }

// Returns at once; the arrays must stay until host_adam_wait returns. With kTouch the arrays are read and written in the
// same pattern without the arithmetic: the ceiling that benchmarks compare with. With kEncode only codes are written.
// With a log, if it is not null, chunks go on where their counters are, and another process can finish what this one
// leaves; of pieces without codes.
HostAdamTicket* host_adam_submit(HostAdamPool* pool, int32_t body, const HostAdamPiece* pieces, int64_t count,
                                 int32_t mode, const HostAdamLog* log) {
  try {
    auto job = std::make_shared<AdamJob>(body, pieces, count, static_cast<Mode>(mode), log, pool->num_threads());
    auto ticket = std::make_unique<HostAdamTicket>(HostAdamTicket{job});
    pool->submit(job);
    return ticket.release();
  } catch (...) {
    return nullptr;
  }
}

// Once a ticket: it is gone afterwards.
void host_adam_wait(HostAdamTicket* ticket) {
  ticket->job->wait();
  delete ticket;
}

int32_t host_adam_squared_norm(HostAdamPool* pool, int32_t body, const void* array, int32_t type, int64_t numel,
                               double* result) {
  try {
    auto job = std::make_shared<NormJob>(body, array, static_cast<Type>(type), numel, pool->num_threads());
    pool->submit(job);
    job->wait();
    *result = job->sum();
    return 1;
  } catch (...) {
    return 0;
  }
}

}  // extern "C"
