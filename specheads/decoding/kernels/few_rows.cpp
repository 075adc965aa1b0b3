// Matrix products and attention over few rows, in float32 or bfloat16. All sums are of float32, and those of a row come
// in the same order whatever the number of rows beside it.
//
// A matrix is read from memory once, in the order it lies there, and asked for before it is needed. Some of its rows are
// multiplied with some of the others at a time: all their sums stay in the processor's registers, and are added up
// together at the end. bfloat16 is multiplied by the best instructions that the processor has: AMX (tiles of 16 × 32), dot
// products of pairs (AVX512-BF16), or those of float32. A matrix of int8, with one factor a row of it, is multiplied with
// rows in bfloat16 by AMX's integers, each row written as a sum of rows of int8 (`Digits`); elsewhere it is widened, a
// vector at a time.

#ifdef __x86_64__
// GCC would tune this for AMD's processors by reading a row anew for each of its products, and reads are what they lack.
#pragma GCC target("tune=generic")
#endif

// ATen/ATen.h has all of these, and takes twice as long to compile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/Utils.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/to.h>
#include <torch/library.h>

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define HAS_PAIRS
#include <immintrin.h>
#endif
#if defined(CPU_CAPABILITY_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vector::size();
// Of a block, whose sums are in registers beside COLUMNS vectors of the matrix and one of the other rows: AVX2 has 16 of
// them, AVX-512 and others 32.
constexpr int ROWS = WIDTH == 8 ? 4 : 6, COLUMNS = WIDTH == 8 ? 3 : 4;
constexpr int AHEAD = 8;  // rows of a matrix: how early the next part is asked for
// Blocks that ask for it. Of what one asks for, some is lost: more than the processor can have under way.
constexpr int ASKING = 2;
constexpr int64_t GRAIN = 32768;  // multiplications of a thread, as many as torch's own loops take at least
constexpr int64_t SCORES = 1 << 17;  // of attention, kept together: they stay in the second cache
constexpr int64_t BLOCK = 8 * COLUMNS;  // columns whose sums are written together
constexpr float NONE = -std::numeric_limits<float>::infinity();
// In a mask, or less: the lowest of bfloat16, and so of float32.
constexpr float FORBIDDEN = -3.3895314e38f;

// Rows of a matrix, each contiguous.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  T* operator[](int64_t row) const { return data + row * stride; }
  Rows from(int64_t row, int64_t column = 0) const { return {data + row * stride + column, stride}; }
};

// Into the second cache: the first has too few reads under way to keep the memory busy. Beyond the end of the matrix it
// does nothing.
void prefetch(const void* address) {
#ifdef __GNUC__
  __builtin_prefetch(address, 0, 2);
#endif
}

// The first `count` elements of a vector, and zeros.
Vector load(const float* elements, int64_t count = WIDTH) { return Vector::loadu(elements, count); }

Vector load(const at::BFloat16* elements, int64_t count = WIDTH) {
  Vector loaded;
  if (count == WIDTH) {
    at::vec::load_fp32_from_bf16(elements, loaded);
  } else {
    at::BFloat16 part[WIDTH] = {};
    std::copy(elements, elements + count, part);
    at::vec::load_fp32_from_bf16(part, loaded);
  }
  return loaded;
}

Vector load(const int8_t* elements, int64_t count = WIDTH) {
  return at::vec::convert<float>(at::vec::Vectorized<int8_t>::loadu(elements, count));
}

void store(const Vector& low, const Vector& high, float* to, int64_t count) {
  low.store(to, std::min(WIDTH, count));
  if (count > WIDTH) high.store(to + WIDTH, count - WIDTH);
}

void store(const Vector& low, const Vector& high, at::BFloat16* to, int64_t count) {
  at::vec::convert_float_bfloat16(low, high).store(to, count);
}

// How a vector of a row, an element or a pair of them a lane, is multiplied with one of the matrix and added to sums.
template <typename T>
struct Widened {
  using Row = float;
  using Column = T;
  static constexpr int64_t STEP = WIDTH;
  static Vector row(const float* elements, int64_t count) { return load(elements, count); }
  static Vector column(const T* elements, int64_t count) { return load(elements, count); }
  static Vector add(const Vector& row, const Vector& column, const Vector& sum) {
    return at::vec::fmadd(row, column, sum);
  }
};

#ifdef HAS_PAIRS
// The first `count` elements of 32 of bfloat16, and zeros.
__m512i load_pairs(const at::BFloat16* elements, int64_t count) {
  return count == 2 * WIDTH ? _mm512_loadu_si512(elements) : _mm512_maskz_loadu_epi16((1u << count) - 1, elements);
}

struct Pairs {
  using Row = at::BFloat16;
  using Column = at::BFloat16;
  static constexpr int64_t STEP = 2 * WIDTH;
  static __m512i row(const Row* elements, int64_t count) { return load_pairs(elements, count); }
  static __m512i column(const Column* elements, int64_t count) { return load_pairs(elements, count); }
  static Vector add(const __m512i& row, const __m512i& column, const Vector& sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)column);
  }
};
#endif

// Sums of N vectors, in order: a round adds neighbours, and makes one vector of two. W: elements that belong together.
// Out of line, the sums would leave their registers.
template <int N, int W = WIDTH>
[[gnu::always_inline]] inline void add_up(Vector* sums) {
  if constexpr (W > 1) {
    constexpr int PAIRS = (N + 1) / 2;
#pragma GCC unroll 16
    for (int i = 0; i < PAIRS; ++i) {
      const auto [even, odd] = at::vec::deinterleave2(sums[2 * i], sums[std::min(2 * i + 1, N - 1)]);
      sums[i] = even + odd;
    }
    add_up<PAIRS, W / 2>(sums);
  }
}

// out[r, c] = the product of rows[r] and matrix[c], which have `length` elements. Both have one stride: with two, the
// addresses do not fit into the processor's registers.
template <typename How>
struct Product {
  const typename How::Row* rows;
  const typename How::Column* matrix;
  int64_t stride, length;
  Rows<float> out;

  template <int R, int C, bool ASKS>
  void block(int64_t first_row, int64_t first_column) const {
    const Rows<const typename How::Row> left{rows + first_row * stride, stride};
    const Rows<const typename How::Column> right{matrix + first_column * stride, stride};
    const Rows<float> to = out.from(first_row, first_column);
    constexpr int64_t STEP = How::STEP;
    const int64_t end = length, whole = end - end % STEP;  // in registers, as members are not
    Vector sums[R * C];
    std::fill(sums, sums + R * C, Vector(0.f));
    const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      decltype(How::column(nullptr, 0)) columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        columns[c] = How::column(right[c] + i, count);
        if constexpr (ASKS) prefetch(right[AHEAD + c] + i);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto row = How::row(left[r] + i, count);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r * C + c] = How::add(row, columns[c], sums[r * C + c]);
      }
    };
    for (int64_t i = 0; i < whole; i += STEP) step(i, STEP);
    if (whole < end) step(whole, end - whole);
    add_up<R * C>(sums);
    float totals[R * C + WIDTH];
    for (int i = 0; i < R * C; i += WIDTH) sums[i / WIDTH].store(totals + i);
    for (int r = 0; r < R; ++r) std::copy(totals + r * C, totals + (r + 1) * C, to[r]);
  }
};

// out[r, c] += weights[r] @ matrix[:, c], of which there are `length`, added one after the other.
template <typename T>
struct Mixture {
  Rows<const float> weights;
  Rows<const T> matrix;
  Rows<float> out;
  int64_t length;

  template <int R, int C, bool ASKS>
  void block(int64_t first_row, int64_t first_column) const {
    const int64_t column = first_column * WIDTH;
    const Rows<const float> left = weights.from(first_row);
    const Rows<const T> right = matrix.from(0, column);
    const Rows<float> sum = out.from(first_row, column);
    Vector sums[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) sums[i] = Vector::loadu(sum[i / C] + i % C * WIDTH);
    for (int64_t i = 0; i < length; ++i) {
      Vector columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        columns[c] = load(right[i] + c * WIDTH);
        if constexpr (ASKS) prefetch(right[i + AHEAD] + c * WIDTH);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector weight(left[r][i]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r * C + c] = at::vec::fmadd(weight, columns[c], sums[r * C + c]);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) sums[i].store(sum[i / C] + i % C * WIDTH);
  }
};

// The blocks of all rows from the first on, of C columns.
template <int C, int R = ROWS, typename Work>
void all_rows(const Work& work, int64_t first_row, int64_t num_rows, int64_t first_column) {
  for (; first_row + R <= num_rows; first_row += R) {
    if (first_row < ASKING * ROWS)
      work.template block<R, C, true>(first_row, first_column);
    else
      work.template block<R, C, false>(first_row, first_column);
  }
  if constexpr (R > 1)
    if (first_row < num_rows) all_rows<C, R - 1>(work, first_row, num_rows, first_column);
}

// All rows of some columns.
template <typename Work>
void run(const Work& work, int64_t num_rows, int64_t column, int64_t end) {
  for (; column + COLUMNS <= end; column += COLUMNS) all_rows<COLUMNS>(work, 0, num_rows, column);
  for (; column < end; ++column) all_rows<1>(work, 0, num_rows, column);
}

// What becomes of a column's sum: it is multiplied with a factor, and something is added to it. Each may be null.
struct Finish {
  const float *scale, *bias;
  Vector operator()(Vector sum, int64_t column, int64_t count) const {
    if (scale) sum = sum * Vector::loadu(scale + column, count);
    return bias ? sum + Vector::loadu(bias + column, count) : sum;
  }
};

// The sums (rows, BLOCK) of all rows and of `count` columns from the first on → out.
template <typename T>
void write(const float* sums, const Finish& finish, int64_t first_column, Rows<T> out, int64_t num_rows, int64_t count) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < count; i += 2 * WIDTH) {
      const int64_t left = std::min(count - i, 2 * WIDTH), low = std::min(left, WIDTH), high = left - low;
      const float* const from = sums + r * BLOCK + i;
      const int64_t column = first_column + i;
      const Vector first = finish(Vector::loadu(from, low), column, low);
      const Vector second = high ? finish(Vector::loadu(from + WIDTH, high), column + WIDTH, high) : Vector(0.f);
      store(first, second, out[r] + column, left);
    }
  }
}

#ifdef HAS_AMX
// GCC's own functions for these do not say which memory they read, so that what was written there may be dropped.
template <int TILE>
void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// Products by AMX: a tile has 16 rows of the matrix as they lie there, by one of 16 pairs of elements of up to 16 rows,
// which are rearranged once for that. T: bfloat16; or int8, of which four take a pair's place, and the sums are of int32 in
// the bits of floats.
template <typename T>
class Tiles {
  static constexpr int64_t SIDE = 16, STEP = 64 / sizeof(T);
  static_assert(BLOCK == 2 * SIDE);

 public:
  // `count` rows of `length` elements.
  Tiles(Rows<const T> rows, int64_t count, int64_t length)
      : length_(length), steps_((length + STEP - 1) / STEP), count_(count), columns_(std::min<int64_t>(count, SIDE)),
        groups_((count + SIDE - 1) / SIDE), pairs_(groups_ * steps_ * SIDE * columns_, 0.f) {
    for (int64_t group = 0; group < groups_; ++group)
      for (int64_t step = 0; step < steps_; ++step) {
        const Rows<const T> from = rows.from(group * SIDE, step * STEP);
        const int64_t num = std::min<int64_t>(count - group * SIDE, SIDE), elements = std::min(STEP, length - step * STEP);
        T padded[SIDE * STEP];
        std::fill(padded, padded + SIDE * STEP, T(0));
        for (int64_t r = 0; r < num; ++r) std::copy(from[r], from[r] + elements, padded + r * STEP);
        // Two or four elements have the size of a float, and are only moved.
        at::vec::transpose_mxn<float>(reinterpret_cast<const float*>(padded), SIDE, pairs_.data() + tile(group, step),
                                      columns_, num, SIDE);
      }
  }

  // Of this thread, for all that follows until `leave`.
  void enter() const {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = SIDE;
      shapes.bytes[i] = 4 * (i == 4 || i == 5 ? SIDE : columns_);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

  static void leave() { _tile_release(); }

  // The sums (M, BLOCK) of the next BLOCK columns, the products with as many rows of a matrix that has `left` more.
  void sums(Rows<const T> matrix, int64_t left, float* out) const {
    sums_of<true>(matrix, left, 0, out);
    for (int64_t group = 2; group < groups_; group += 2) sums_of<false>(matrix, left, group, out);
  }

 private:
  int64_t tile(int64_t group, int64_t step) const { return (group * steps_ + step) * SIDE * columns_; }

  // Both tiles of the matrix by tile 6 or 7. The compiler's functions take numbers alone, not constants.
  template <int ROW>
  static void add() {
    constexpr bool INTEGERS = std::is_same_v<T, int8_t>;
    if constexpr (INTEGERS && ROW == 6) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
    } else if constexpr (INTEGERS) {
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    } else if constexpr (ROW == 6) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    } else {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // Two tiles of the matrix by one or two of the rows. Tiles 0 to 3 are sums, 4 and 5 the matrix, 6 and 7 rows. ASKS: for
  // the matrix, before it is needed.
  template <bool ASKS>
  void sums_of(Rows<const T> matrix, int64_t left, int64_t group, float* out) const {
    constexpr int64_t EARLY = 8 * STEP;  // how many elements ahead the matrix is asked for
    const bool two = group + 1 < groups_;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps_; ++step) {
      const int64_t offset = step * STEP, count = std::min(STEP, length_ - offset);
      const T* from = matrix[0] + offset;
      int64_t stride = matrix.stride;
      T edge[BLOCK * STEP];
      if (left >= BLOCK && count == STEP) {
        if (ASKS) {  // this part of later columns
          const int64_t later = offset + EARLY;
          const auto ahead = later < length_ ? matrix.from(0, later) : matrix.from(BLOCK, later - length_);
          if (left >= (later < length_ ? BLOCK : 2 * BLOCK))
            for (int64_t i = 0; i < BLOCK; ++i) _mm_prefetch(reinterpret_cast<const char*>(ahead[i]), _MM_HINT_T0);
        }
      } else {
        std::fill(edge, edge + BLOCK * STEP, T(0));
        for (int64_t i = 0; i < std::min(BLOCK, left); ++i)
          std::copy(matrix[i] + offset, matrix[i] + offset + count, edge + i * STEP);
        from = edge, stride = STEP;
      }
      load_tile<4>(from, sizeof(T) * stride);
      load_tile<5>(from + SIDE * stride, sizeof(T) * stride);
      load_tile<6>(pairs_.data() + tile(group, step), 4 * columns_);
      add<6>();
      if (two) {
        load_tile<7>(pairs_.data() + tile(group + 1, step), 4 * columns_);
        add<7>();
      }
    }
    float found[4][SIDE * SIDE];
    store_tile<0>(found[0], 4 * columns_);
    store_tile<1>(found[1], 4 * columns_);
    store_tile<2>(found[2], 4 * columns_);
    store_tile<3>(found[3], 4 * columns_);
    for (int i = 0; i < (two ? 4 : 2); ++i) {
      const int64_t row = (group + i / 2) * SIDE;
      at::vec::transpose_mxn<float>(found[i], columns_, out + row * BLOCK + i % 2 * SIDE, BLOCK, SIDE,
                                    std::min<int64_t>(count_ - row, SIDE));
    }
  }

  int64_t length_, steps_, count_, columns_, groups_;
  std::vector<float> pairs_;
};
#endif

// out (M, N) = rows (M, K) by the transpose of a weight (N, K), finished. What begin_thread() returns gives, called with
// (first, count, sums), the sums (M, BLOCK) of `count` columns; `parts`: for how many times as many it needs room.
template <typename T, typename Begin>
void by_blocks(int64_t length, const Finish& finish, at::Tensor& out, const Begin& begin_thread, int64_t parts = 1) {
  const int64_t count = out.size(0), width = out.size(1);
  const Rows<T> to{out.mutable_data_ptr<T>(), width};
  const int64_t grain = GRAIN / (BLOCK * (length + 1)) + 1;
  at::parallel_for(0, (width + BLOCK - 1) / BLOCK, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(parts * count * BLOCK);
    auto block = begin_thread();
    for (int64_t first = begin * BLOCK; first < std::min(end * BLOCK, width); first += BLOCK) {
      const int64_t columns = std::min(BLOCK, width - first);
      block(first, columns, sums.data());
      write(sums.data(), finish, first, to, count, columns);
    }
  });
}

// The same, by vectors. T: of the result.
template <typename How, typename T>
void by_vectors(const at::Tensor& given_rows, const at::Tensor& weight, const Finish& finish, at::Tensor& out) {
  const at::Tensor rows = given_rows.to(c10::CppTypeToScalarType<typename How::Row>::value);
  const int64_t length = rows.size(1);
  by_blocks<T>(length, finish, out, [&] {
    return [&](int64_t first, int64_t columns, float* sums) {
      const Product<How> work{rows.const_data_ptr<typename How::Row>(),
                              weight.const_data_ptr<typename How::Column>() + first * length, length, length,
                              {sums, BLOCK}};
      run(work, rows.size(0), 0, columns);
    };
  });
}

#ifdef HAS_AMX
// The tiles as one thread uses them.
template <typename T>
struct TilesOfThread {
  const Tiles<T>& tiles;
  explicit TilesOfThread(const Tiles<T>& tiles) : tiles(tiles) { tiles.enter(); }
  TilesOfThread(const TilesOfThread&) = delete;
  ~TilesOfThread() { Tiles<T>::leave(); }
};

void by_tiles(const at::Tensor& rows, const at::Tensor& weight, const Finish& finish, at::Tensor& out) {
  const int64_t length = rows.size(1), width = weight.size(0);
  const Rows<const at::BFloat16> matrix{weight.const_data_ptr<at::BFloat16>(), length};
  const Tiles<at::BFloat16> tiles({rows.const_data_ptr<at::BFloat16>(), length}, rows.size(0), length);
  by_blocks<at::BFloat16>(length, finish, out, [&] {
    return [thread = TilesOfThread(tiles), matrix, width](int64_t first, int64_t, float* sums) {
      thread.tiles.sums(matrix.from(first), width - first, sums);
    };
  });
}

// Rows of bfloat16 as integers of 20 bits and a sign, times a power of two for each row that leaves its largest element
// just below 2^20: what is within 2^-12 of that is exact. An integer is a number of COUNT digits from -64 to 64, to the
// base of 128, and each digit a row of int8, the lowest first. Rows with NaN or infinity have NaN for that power.
class Digits {
 public:
  static constexpr int64_t COUNT = 3, LENGTH = 1 << 16;  // sums of longer rows might not fit into int32

  Digits(Rows<const at::BFloat16> rows, int64_t count, int64_t length)
      : length_(length), digits_(COUNT * count * length), powers_(count) {
    const auto element = [&](int64_t r, int64_t i) { return load(rows[r] + i, std::min(WIDTH, length - i)); };
    for (int64_t r = 0; r < count; ++r) {
      __m512i magnitude = _mm512_setzero_si512();  // the bits of floats without a sign are in the order of the floats
      for (int64_t i = 0; i < length; i += WIDTH)
        magnitude = _mm512_max_epi32(magnitude, _mm512_castps_si512(element(r, i).abs()));
      const int exponent = _mm512_reduce_max_epi32(magnitude) >> 23, least = 127 - 100;
      const bool finite = exponent < 255;
      const int bits = 20 + 126 - std::max(exponent, least);  // all below 2^-100 are integers of fewer bits
      powers_[r] = finite ? std::ldexp(1.f, -bits) : std::numeric_limits<float>::quiet_NaN();
      const Vector power(finite ? std::ldexp(1.f, bits) : 0.f);
      for (int64_t i = 0; i < length; i += WIDTH) {
        const auto mask = static_cast<__mmask16>((1u << std::min(WIDTH, length - i)) - 1);
        __m512i integer = _mm512_cvtps_epi32(element(r, i) * power);
        for (int64_t digit = 0; digit < COUNT; ++digit) {
          const __m512i half = _mm512_set1_epi32(64), lowest = _mm512_set1_epi32(127);
          const __m512i least_one = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(integer, half), lowest), half);
          const __m512i value = digit + 1 < COUNT ? least_one : integer;
          _mm512_mask_cvtepi32_storeu_epi8(digits_.data() + (r * COUNT + digit) * length + i, mask, value);
          integer = _mm512_srai_epi32(_mm512_sub_epi32(integer, value), 7);
        }
      }
    }
  }

  Rows<const int8_t> rows() const { return {digits_.data(), length_}; }
  int64_t count() const { return COUNT * static_cast<int64_t>(powers_.size()); }

  // The sums (COUNT · M, BLOCK) of all digits, int32 in the bits of floats → the sums (M, BLOCK) of the rows, in place.
  void put_together(float* sums) const {
    for (size_t r = 0; r < powers_.size(); ++r)
      for (int64_t i = 0; i < BLOCK; i += WIDTH) {
        Vector total(0.f);
        for (int64_t digit = COUNT; digit-- > 0;) {
          const __m512i part = _mm512_loadu_si512(sums + (r * COUNT + digit) * BLOCK + i);
          total = at::vec::fmadd(total, Vector(128.f), Vector(_mm512_cvtepi32_ps(part)));
        }
        (total * Vector(powers_[r])).store(sums + r * BLOCK + i);
      }
  }

 private:
  int64_t length_;
  std::vector<int8_t> digits_;
  std::vector<float> powers_;
};

void by_digits(const at::Tensor& rows, const at::Tensor& weight, const Finish& finish, at::Tensor& out) {
  const int64_t length = rows.size(1), width = weight.size(0);
  const Rows<const int8_t> matrix{weight.const_data_ptr<int8_t>(), length};
  const Digits digits({rows.const_data_ptr<at::BFloat16>(), length}, rows.size(0), length);
  const Tiles<int8_t> tiles(digits.rows(), digits.count(), length);
  const auto begin_thread = [&] {
    return [&digits, thread = TilesOfThread(tiles), matrix, width](int64_t first, int64_t, float* sums) {
      thread.tiles.sums(matrix.from(first), width - first, sums);
      digits.put_together(sums);
    };
  };
  by_blocks<at::BFloat16>(length, finish, out, begin_thread, Digits::COUNT);
}
#endif

// What multiplies rows of bfloat16 with a matrix of T, bfloat16 or int8, on this processor, the best first.
template <typename T>
const std::vector<std::string>& instructions() {
  static const std::vector<std::string> known = [] {
    std::vector<std::string> names;
#ifdef HAS_AMX
    if (at::cpu::init_amx()) names.emplace_back("amx");
#endif
#ifdef HAS_PAIRS
    if (std::is_same_v<T, at::BFloat16>) names.emplace_back("avx512_bf16");
#endif
    names.emplace_back("float32");
    return names;
  }();
  return known;
}

// Products with a weight of T, float32 or bfloat16 as the rows are, or int8.
template <typename T>
void multiply(const at::Tensor& rows, const at::Tensor& weight, const Finish& finish, at::Tensor& out,
              const std::optional<std::string_view>& by) {
  if constexpr (!std::is_same_v<T, at::BFloat16>)
    if (rows.scalar_type() == at::kFloat) return by_vectors<Widened<T>, float>(rows, weight, finish, out);
  if constexpr (!std::is_same_v<T, float>) {
    const std::vector<std::string>& known = instructions<T>();
    const std::string how(by.value_or(known.front()));
    TORCH_CHECK(std::find(known.begin(), known.end(), how) != known.end(), "this processor has no ", how);
#ifdef HAS_AMX
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (how == "amx") return by_tiles(rows, weight, finish, out);
    } else if (how == "amx" && rows.size(1) <= Digits::LENGTH) {
      return by_digits(rows, weight, finish, out);
    }
#endif
#ifdef HAS_PAIRS
    if constexpr (std::is_same_v<T, at::BFloat16>)
      if (how == "avx512_bf16") return by_vectors<Pairs, at::BFloat16>(rows, weight, finish, out);
#endif
    by_vectors<Widened<T>, at::BFloat16>(rows, weight, finish, out);
  }
}

// rows (…, K) by the transpose of a linear layer's weight (N, K), and a bias (N) or none → (…, N) like rows. The weight
// has the rows' dtype, or is int8 with a scale (N) of its rows. `by`: one of the instructions, none for the best.
at::Tensor product(const at::Tensor& given_rows, const at::Tensor& given_weight, const std::optional<at::Tensor>& bias,
                   std::optional<std::string_view> by, const std::optional<at::Tensor>& scale) {
  const int64_t length = given_weight.size(1), width = given_weight.size(0);
  const bool narrow = given_weight.scalar_type() == at::kChar, wide = given_rows.scalar_type() == at::kFloat;
  TORCH_CHECK(given_rows.size(-1) == length, "rows of ", given_rows.size(-1), " elements by a matrix of ", length);
  TORCH_CHECK(wide || given_rows.scalar_type() == at::kBFloat16, "rows must be of float32 or bfloat16");
  TORCH_CHECK(narrow || given_rows.scalar_type() == given_weight.scalar_type(), "rows and matrix must have one dtype");
  TORCH_CHECK(narrow == scale.has_value(), "a matrix of int8 has a scale, and no other has");
  for (const auto& one : {bias, scale})
    TORCH_CHECK(!one || one->numel() == width, one ? one->numel() : 0, " numbers for ", width, " columns");
  auto shape = given_rows.sizes().vec();
  shape.back() = width;
  const int64_t count = c10::multiply_integers(shape.begin(), shape.end() - 1);
  const at::Tensor weight = given_weight.contiguous(), rows = given_rows.reshape({count, length}).contiguous();
  at::Tensor out = at::empty({count, width}, rows.options());
  if (!out.numel()) return out.view(shape);
  const auto floats = [](const std::optional<at::Tensor>& one) {
    return one ? one->to(at::kFloat).contiguous() : at::Tensor();
  };
  const at::Tensor factors = floats(scale), offsets = floats(bias);
  const Finish finish{scale ? factors.const_data_ptr<float>() : nullptr, bias ? offsets.const_data_ptr<float>() : nullptr};
  if (narrow)
    multiply<int8_t>(rows, weight, finish, out, by);
  else if (wide)
    multiply<float>(rows, weight, finish, out, by);
  else
    multiply<at::BFloat16>(rows, weight, finish, out, by);
  return out.view(shape);
}

// Keys from one on, up to another.
struct Span {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Those of the keys that some row's mask allows, from the first to the last: a text is shorter than its cache. All keys
// if the mask of some row allows none.
std::array<Span, 2> allowed(Rows<const float> mask, int64_t num_rows, const std::array<Span, 2>& spans) {
  const auto allows = [](float element) { return element > FORBIDDEN; };
  std::array<Span, 2> narrow{Span{spans[0].end, spans[0].begin}, Span{spans[1].end, spans[1].begin}};
  for (int64_t r = 0; r < num_rows; ++r) {
    bool any = false;
    for (int i = 0; i < 2; ++i) {
      const float *const first = mask[r] + spans[i].begin, *const past = mask[r] + spans[i].end;
      const float* const lowest = std::find_if(first, past, allows);
      if (lowest == past) continue;
      any = true;
      const std::reverse_iterator<const float*> from_end(past), to_start(first);
      narrow[i].begin = std::min(narrow[i].begin, lowest - mask[r]);
      narrow[i].end = std::max(narrow[i].end, std::find_if(from_end, to_start, allows).base() - mask[r]);
    }
    if (!any) return spans;
  }
  for (Span& span : narrow) span.end = std::max(span.begin, span.end);
  return narrow;
}

// Scores (R, count), padded with NONE to whole vectors → the weights of their softmax, not yet divided by their sums,
// which are returned. A row without any score above NONE has no weights.
void weigh(Rows<float> scores, int64_t num_rows, int64_t count, float* totals) {
  const int64_t whole = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int64_t r = 0; r < num_rows; ++r) {
    Vector high(NONE);
    for (int64_t i = 0; i < whole; i += WIDTH) high = at::vec::maximum(high, Vector::loadu(scores[r] + i));
    float elements[WIDTH];
    high.store(elements);
    const float highest = *std::max_element(elements, elements + WIDTH);
    if (highest == NONE) {
      std::fill(scores[r], scores[r] + whole, 0.f);
      continue;
    }
    for (int64_t i = 0; i < whole; i += WIDTH)
      (Vector::loadu(scores[r] + i) - Vector(highest)).exp_u20().store(scores[r] + i);
  }
  // One after the other, so that keys of no weight change no sum; some rows at a time, as each waits for its own.
  constexpr int TOGETHER = 8;
  for (int64_t first = 0; first < num_rows; first += TOGETHER) {
    const int64_t rows = std::min<int64_t>(TOGETHER, num_rows - first);
    float sums[TOGETHER] = {};
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < rows; ++r) sums[r] += scores[first + r][i];
    std::copy(sums, sums + rows, totals + first);
  }
}

// Attention of one head: query rows, of which each attends to all keys its mask allows, in the order of the spans.
template <typename T>
void attend(Rows<const T> query, Rows<const T> keys, Rows<const T> values, Rows<const float> mask, Rows<T> out,
            int64_t num_rows, const std::array<Span, 2>& spans, int64_t width, float scale) {
  const int64_t num_keys = spans[0].count() + spans[1].count(), stride = (num_keys + WIDTH - 1) / WIDTH * WIDTH + WIDTH;
  std::vector<float> mixed(num_rows * width, 0.f), totals(num_rows), sums(num_rows * BLOCK);
  const std::unique_ptr<float[]> buffer(new float[num_rows * stride]);
  const Rows<float> scores{buffer.get(), stride};
  const auto score = [&](const auto& products) {
    float* to = buffer.get();
    for (const Span& span : spans)
      for (int64_t first = span.begin; first < span.end; first += BLOCK) {
        const int64_t count = std::min(BLOCK, span.end - first);
        products(keys.from(first), span.end - first);
        for (int64_t r = 0; r < num_rows; ++r)
          for (int64_t i = 0; i < count; i += WIDTH) {
            const int64_t part = std::min(WIDTH, count - i);
            const Vector added = Vector::loadu(mask[r] + first + i, part);
            at::vec::fmadd(Vector::loadu(sums.data() + r * BLOCK + i), Vector(scale), added).store(to + r * stride + i, part);
          }
        to += count;
      }
  };
  const auto by_vectors = [&] {
    std::vector<float> wide(num_rows * keys.stride);
    for (int64_t r = 0; r < num_rows; ++r) std::copy(query[r], query[r] + width, wide.data() + r * keys.stride);
    score([&](Rows<const T> from, int64_t left) {
      const Product<Widened<T>> work{wide.data(), from[0], keys.stride, width, {sums.data(), BLOCK}};
      run(work, num_rows, 0, std::min(BLOCK, left));
    });
  };
#ifdef HAS_AMX
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    if (instructions<T>().front() == "amx") {
      const Tiles<T> tiles(query, num_rows, width);
      const TilesOfThread<T> thread(tiles);
      score([&](Rows<const T> from, int64_t left) { tiles.sums(from, left, sums.data()); });
    } else {
      by_vectors();
    }
  } else {
    by_vectors();
  }
#else
  by_vectors();
#endif
  for (int64_t r = 0; r < num_rows; ++r) std::fill(scores[r] + num_keys, scores[r] + stride, NONE);
  weigh(scores, num_rows, num_keys, totals.data());
  int64_t before = 0;
  for (const Span& span : spans) {
    const Mixture<T> work{{buffer.get() + before, stride}, values.from(span.begin), {mixed.data(), width}, span.count()};
    run(work, num_rows, 0, width / WIDTH);
    before += span.count();
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const Vector share(totals[r] > 0.f ? 1.f / totals[r] : 0.f);
    for (int64_t i = 0; i < width; i += 2 * WIDTH) {
      const int64_t count = std::min(2 * WIDTH, width - i);
      const float* const from = mixed.data() + r * width + i;
      store(Vector::loadu(from) * share, count > WIDTH ? Vector::loadu(from + WIDTH) * share : share, out[r] + i, count);
    }
  }
}

at::Tensor dense_rows(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

// The heads, and of each some query rows at a time: as many as have SCORES with all keys.
template <typename T>
void attend_all(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                at::Tensor& out, int64_t last, float scale) {
  const int64_t heads = query.size(1), num_rows = query.size(2), num_keys = key.size(2), width = query.size(3);
  const int64_t together = std::min(num_rows, std::max<int64_t>(SCORES / (num_keys + 1) / ROWS, 1) * ROWS);
  const int64_t parts = (num_rows + together - 1) / together, grain = GRAIN / (together * num_keys * width + 1) + 1;
  at::parallel_for(0, query.size(0) * heads * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / parts, first = i % parts * together, rows = std::min(together, num_rows - first);
      const auto offset = [&](const at::Tensor& tensor) {
        return head / heads * tensor.stride(0) + head % heads * tensor.stride(1);
      };
      const auto rows_of = [&](const at::Tensor& tensor) {
        return Rows<const T>{tensor.const_data_ptr<T>() + offset(tensor), tensor.stride(2)};
      };
      const Rows<const float> allows =
          Rows<const float>{mask.const_data_ptr<float>() + offset(mask), mask.stride(2)}.from(first);
      const auto spans = allowed(allows, rows, {Span{last, num_keys}, Span{0, last}});
      attend<T>(rows_of(query).from(first), rows_of(key), rows_of(value), allows,
                Rows<T>{out.mutable_data_ptr<T>() + offset(out), out.stride(2)}.from(first), rows, spans, width, scale);
    }
  });
}

// query (B, H, M, d), key and value (B, H, L, d), mask to be added, which expands to (B, H, M, L) → like query. d is a
// multiple of the vector's width. The first `last` keys come last in each sum: a row then has the same sums whether it
// attends to a token there, or to the same token as the next of the others.
at::Tensor attention(const at::Tensor& given_query, const at::Tensor& given_key, const at::Tensor& given_value,
                     const at::Tensor& given_mask, double scale, int64_t last) {
  const at::Tensor query = dense_rows(given_query), key = dense_rows(given_key), value = dense_rows(given_value);
  const at::Tensor mask = dense_rows(
      given_mask.to(at::kFloat).expand({query.size(0), query.size(1), query.size(2), key.size(2)}));
  TORCH_CHECK(0 <= last && last <= key.size(2), "no ", last, " of ", key.size(2), " keys");
  at::Tensor out = at::empty_like(query);
  if (query.scalar_type() == at::kFloat)
    attend_all<float>(query, key, value, mask, out, last, static_cast<float>(scale));
  else
    attend_all<at::BFloat16>(query, key, value, mask, out, last, static_cast<float>(scale));
  return out;
}

std::vector<std::string> known_instructions(bool narrow) {
  return narrow ? instructions<int8_t>() : instructions<at::BFloat16>();
}

}  // namespace

TORCH_LIBRARY(specheads, library) {
  library.def("few_rows(Tensor rows, Tensor weight, Tensor? bias=None, str? by=None, Tensor? scale=None) -> Tensor");
  library.def(
      "attention_of_few_rows(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, int last=0) -> Tensor");
  library.def("instructions(bool int8=False) -> str[]", &known_instructions);
}
TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("few_rows", &product);
  library.impl("attention_of_few_rows", &attention);
}
