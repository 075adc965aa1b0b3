// What a compiled step computes over few rows: matrix products, with matrices in float32 or bfloat16, and attention of few
// queries in float32. All sums are of float32.
//
// A matrix is read from memory once, in the order it lies there, and asked for before it is needed. Some of its rows are
// multiplied with some of the others at a time: all their sums stay in the processor's registers, a vector each, and are
// added up together at the end.

#ifdef __x86_64__
// GCC would tune this for AMD's processors by reading a row anew for each of its products, and reads are what they lack.
#pragma GCC target("tune=generic")
#endif

// ATen/ATen.h has all of these, and takes twice as long to compile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/to.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
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
constexpr int64_t KEYS = 256;  // attended at a time: their scores stay in the first cache
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float FORBIDDEN = std::numeric_limits<float>::lowest();  // in a mask, or less

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

Vector load(const float* elements) { return Vector::loadu(elements); }

Vector load(const at::BFloat16* elements) {
  Vector loaded;
  at::vec::load_fp32_from_bf16(elements, loaded);
  return loaded;
}

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
template <typename T>
struct Product {
  const float* rows;
  const T* matrix;
  int64_t stride, length;
  Rows<float> out;

  template <int R, int C, bool ASKS>
  void block(int64_t first_row, int64_t first_column) const {
    const Rows<const float> left{rows + first_row * stride, stride};
    const Rows<const T> right{matrix + first_column * stride, stride};
    const Rows<float> to = out.from(first_row, first_column);
    const int64_t end = length, whole = end - end % WIDTH;  // in registers, as members are not
    Vector sums[R * C];
    std::fill(sums, sums + R * C, Vector(0.f));
    for (int64_t i = 0; i < whole; i += WIDTH) {
      Vector columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        columns[c] = load(right[c] + i);
        if constexpr (ASKS) prefetch(right[AHEAD + c] + i);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector row = Vector::loadu(left[r] + i);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r * C + c] = at::vec::fmadd(row, columns[c], sums[r * C + c]);
      }
    }
    add_up<R * C>(sums);
    float totals[R * C + WIDTH];
    for (int i = 0; i < R * C; i += WIDTH) sums[i / WIDTH].store(totals + i);
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c)
        for (int64_t i = whole; i < end; ++i) totals[r * C + c] += left[r][i] * static_cast<float>(right[c][i]);
      std::copy(totals + r * C, totals + (r + 1) * C, to[r]);
    }
  }
};

// out[r, c] += weights[r] @ matrix[:, c], of which there are `length`.
struct Mixture {
  Rows<const float> weights, matrix;
  Rows<float> out;
  int64_t length;

  template <int R, int C, bool ASKS>
  void block(int64_t first_row, int64_t first_column) const {
    const int64_t column = first_column * WIDTH;
    const Rows<const float> left = weights.from(first_row), right = matrix.from(0, column);
    const Rows<float> sum = out.from(first_row, column);
    Vector sums[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) sums[i] = Vector::loadu(sum[i / C] + i % C * WIDTH);
    for (int64_t i = 0; i < length; ++i) {
      Vector columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        columns[c] = Vector::loadu(right[i] + c * WIDTH);
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

int64_t padded(int64_t length) { return (length + WIDTH - 1) / WIDTH * WIDTH; }

// rows (M, K) of float32 by the transpose of a weight (N, K) → (M, N) of float32.
template <typename T>
at::Tensor product_by(const at::Tensor& rows, const at::Tensor& weight) {
  const int64_t count = rows.size(0), length = rows.size(1), width = weight.size(0);
  at::Tensor out = at::empty({count, width}, rows.options());
  const Product<T> work{rows.const_data_ptr<float>(), weight.const_data_ptr<T>(), length, length,
                        {out.mutable_data_ptr<float>(), width}};
  const int64_t grain = GRAIN / (COLUMNS * (length + 1)) + 1;
  at::parallel_for(0, (width + COLUMNS - 1) / COLUMNS, grain, [&](int64_t begin, int64_t end) {
    run(work, count, begin * COLUMNS, std::min(end * COLUMNS, width));
  });
  return out;
}

// rows (M, K) by a matrix (K, N), and a bias (N) or none → (M, N) like rows. Added up in float32. A linear layer's matrix
// lies in memory as (N, K), and is not copied then.
at::Tensor product(const at::Tensor& given_rows, const at::Tensor& matrix, const std::optional<at::Tensor>& bias) {
  const at::Tensor rows = given_rows.to(at::kFloat).contiguous(), weight = matrix.t().contiguous();
  at::Tensor out =
      weight.scalar_type() == at::kFloat ? product_by<float>(rows, weight) : product_by<at::BFloat16>(rows, weight);
  if (bias) out.add_(*bias);
  return out.to(given_rows.scalar_type());
}

// Softmax over keys that come in parts: what the rows have seen so far.
struct Softmax {
  std::vector<float> highest, total;

  explicit Softmax(int64_t num_rows) : highest(num_rows, NONE), total(num_rows, 0.f) {}

  // Scores, to which the mask is added → the weights of a part. Their last vector is filled up with NONE. Returns by
  // how much to multiply what the row has mixed before.
  float weigh(int64_t row, float* scores, const float* mask, int64_t count) {
    Vector high(NONE);
    for (int64_t i = 0; i < count; i += WIDTH) {
      const Vector score = Vector::loadu(scores + i) + Vector::loadu(mask + i, std::min(WIDTH, count - i));
      score.store(scores + i);
      high = at::vec::maximum(high, score);
    }
    float elements[WIDTH];
    high.store(elements);
    const float before = highest[row], now = std::max(before, *std::max_element(elements, elements + WIDTH));
    if (now == NONE) {  // nothing to attend to so far
      std::fill(scores, scores + count, 0.f);
      return 1.f;
    }
    Vector sum(0.f);
    for (int64_t i = 0; i < count; i += WIDTH) {
      const Vector weight = (Vector::loadu(scores + i) - Vector(now)).exp_u20();
      weight.store(scores + i);
      sum = sum + weight;
    }
    sum.store(elements);
    const float kept = before == NONE ? 0.f : std::exp(before - now);
    highest[row] = now;
    total[row] = std::accumulate(elements, elements + WIDTH, total[row] * kept);
    return kept;
  }
};

// The first key that a row's mask allows, and the one after the last: a text is shorter than its cache. All keys if the
// mask of some row allows none.
std::pair<int64_t, int64_t> allowed(Rows<const float> mask, int64_t num_rows, int64_t num_keys) {
  int64_t begin = num_keys, end = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float *const first = mask[r], *const past = first + num_keys;
    const auto allows = [](float element) { return element > FORBIDDEN; };
    const float* const lowest = std::find_if(first, past, allows);
    if (lowest == past) return {0, num_keys};
    begin = std::min(begin, lowest - first);
    end = std::max(end, std::find_if(std::reverse_iterator(past), std::reverse_iterator(first), allows).base() - first);
  }
  return {begin, end};
}

// Attention of one head: query rows, of which each attends to all keys its mask allows.
void attend(Rows<const float> query, Rows<const float> keys, Rows<const float> values, Rows<const float> mask,
            Rows<float> out, int64_t num_rows, int64_t num_keys, int64_t width, float scale) {
  Softmax softmax(num_rows);
  std::vector<float> scaled(num_rows * keys.stride), scores(num_rows * KEYS), mixed(num_rows * width, 0.f);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t i = 0; i < width; ++i) scaled[r * keys.stride + i] = query[r][i] * scale;
  const auto [begin, end] = allowed(mask, num_rows, num_keys);
  for (int64_t first = begin; first < end; first += KEYS) {
    const int64_t count = std::min(KEYS, end - first);
    run(Product<float>{scaled.data(), keys[first], keys.stride, width, {scores.data(), KEYS}}, num_rows, 0, count);
    for (int64_t r = 0; r < num_rows; ++r) {
      float* row = scores.data() + r * KEYS;
      std::fill(row + count, row + padded(count), NONE);
      const float kept = softmax.weigh(r, row, mask[r] + first, count);
      if (kept != 1.f)
        for (int64_t i = 0; i < width; ++i) mixed[r * width + i] *= kept;
    }
    run(Mixture{{scores.data(), KEYS}, values.from(first), {mixed.data(), width}, count}, num_rows, 0, width / WIDTH);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const float share = softmax.total[r] > 0.f ? 1.f / softmax.total[r] : 0.f;
    for (int64_t i = 0; i < width; ++i) out[r][i] = mixed[r * width + i] * share;
  }
}

at::Tensor dense_rows(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

// query (B, H, M, d), key and value (B, H, L, d), mask to be added, which expands to (B, H, M, L) → like query. d is a
// multiple of the vector's width.
at::Tensor attention(const at::Tensor& given_query, const at::Tensor& given_key, const at::Tensor& given_value,
                     const at::Tensor& given_mask, double scale) {
  const at::Tensor query = dense_rows(given_query), key = dense_rows(given_key), value = dense_rows(given_value);
  const int64_t heads = query.size(1), num_rows = query.size(2), num_keys = key.size(2), width = query.size(3);
  const at::Tensor mask = dense_rows(given_mask.expand({query.size(0), heads, num_rows, num_keys}));
  at::Tensor out = at::empty_like(query);
  const auto offset = [&](const at::Tensor& tensor, int64_t head) {
    return head / heads * tensor.stride(0) + head % heads * tensor.stride(1);
  };
  const auto head_of = [&](const at::Tensor& tensor, int64_t head) {
    return Rows<const float>{tensor.const_data_ptr<float>() + offset(tensor, head), tensor.stride(2)};
  };
  const int64_t grain = GRAIN / (num_rows * num_keys * width + 1) + 1;
  at::parallel_for(0, query.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head)
      attend(head_of(query, head), head_of(key, head), head_of(value, head), head_of(mask, head),
             {out.mutable_data_ptr<float>() + offset(out, head), out.stride(2)}, num_rows, num_keys, width,
             static_cast<float>(scale));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(specheads, library) {
  library.def("few_rows(Tensor rows, Tensor matrix, Tensor? bias=None) -> Tensor");
  library.def("attention_of_few_rows(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("few_rows", &product);
  library.impl("attention_of_few_rows", &attention);
}
