// Matrix products of few rows in float32: rows (M, K) by the transpose of a weight (N, K), as a linear layer has it.
//
// The weight is read from memory once, in the order it lies there, and asked for before it is needed. Four of its rows
// are multiplied with six of the others at a time: all their sums stay in the processor's registers.

// ATen/ATen.h has all of these, and takes twice as long to compile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional_base.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vector::size();
constexpr int ROWS = 6, WEIGHTS = 4;  // of a block: 24 sums; AVX-512 has 32 registers
constexpr int AHEAD = 8;  // rows of the weight: how early the next part is asked for
constexpr int64_t GRAIN = 32768;  // multiplications of a thread, as many as torch's own loops take at least

// A matrix of contiguous rows.
template <typename T>
struct Rows {
  T* data;
  int64_t length;
  T* operator[](int64_t row) const { return data + row * length; }
};

void prefetch(const float* address) {  // beyond the end of the weight it does nothing
#ifdef __GNUC__
  __builtin_prefetch(address);
#endif
}

// out[r, c] = the product of rows[r] and weight[c].
template <int R, int C>
void block(Rows<const float> rows, Rows<const float> weight, Rows<float> out) {
  Vector sums[R][C];
  for (auto& row : sums)
    for (auto& sum : row) sum = Vector(0.f);
  const int64_t length = rows.length, whole = length - length % WIDTH;
  for (int64_t i = 0; i < whole; i += WIDTH) {
    Vector weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      weights[c] = Vector::loadu(weight[c] + i);
      prefetch(weight[AHEAD] + i * C + c * WIDTH);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vector row = Vector::loadu(rows[r] + i);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = at::vec::fmadd(row, weights[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float sum = at::vec::vec_reduce_all<float>([](Vector a, Vector b) { return a + b; }, sums[r][c]);
      for (int64_t i = whole; i < length; ++i) sum += rows[r][i] * weight[c][i];
      out[r][c] = sum;
    }
}

// The block of all rows there are, at most R.
template <int R, int C>
void block_of(int64_t count, Rows<const float> rows, Rows<const float> weight, Rows<float> out) {
  if constexpr (R > 1)
    if (count < R) return block_of<R - 1, C>(count, rows, weight, out);
  block<R, C>(rows, weight, out);
}

// All rows by C rows of the weight.
template <int C>
void columns(int64_t count, Rows<const float> rows, Rows<const float> weight, Rows<float> out) {
  for (int64_t r = 0; r < count; r += ROWS)
    block_of<ROWS, C>(count - r, {rows[r], rows.length}, weight, {out[r], out.length});
}

at::Tensor few_rows(const at::Tensor& given_rows, const at::Tensor& given_weight) {
  const at::Tensor rows = given_rows.contiguous(), weight = given_weight.contiguous();
  const int64_t count = rows.size(0), length = rows.size(1), width = weight.size(0);
  at::Tensor out = at::empty({count, width}, rows.options());
  const Rows<const float> left{rows.const_data_ptr<float>(), length}, right{weight.const_data_ptr<float>(), length};
  float* products = out.mutable_data_ptr<float>();
  const int64_t grain = GRAIN / (WEIGHTS * (length + 1)) + 1;
  at::parallel_for(0, (width + WEIGHTS - 1) / WEIGHTS, grain, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * WEIGHTS, width);
    int64_t c = begin * WEIGHTS;
    for (; c + WEIGHTS <= last; c += WEIGHTS)
      columns<WEIGHTS>(count, left, {right[c], length}, {products + c, width});
    for (; c < last; ++c) columns<1>(count, left, {right[c], length}, {products + c, width});
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(specheads, library) { library.def("few_rows(Tensor rows, Tensor weight) -> Tensor"); }
TORCH_LIBRARY_IMPL(specheads, CPU, library) { library.impl("few_rows", &few_rows); }
