// Stands in for CUDA's <mma.h>: warp matrices of half or bfloat16, summed in float. Which elements
// a lane holds is unspecified there too: here they are consecutive ones of the row-major matrix.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace nvcuda::wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M * N * K == 16 * 16 * 16 && K == 16, "16x16x16, 32x8x16 or 8x32x16");
  static constexpr int kColumns = std::is_same_v<Use, matrix_a> ? K : N;
  static constexpr int kElements =
      std::is_same_v<Use, accumulator> ? M * N : (std::is_same_v<Use, matrix_a> ? M : N) * K;
  static constexpr int num_elements = kElements / 32;
  T x[num_elements];
};

// Each warp's two factors, for as long as a product takes.
inline float factors[32][2][512];

template <typename Use, int M, int N, int K, typename T, typename Layout>
void fill_fragment(fragment<Use, M, N, K, T, Layout>& matrix,
                   const std::type_identity_t<T>& value) {
  for (T& element : matrix.x) element = value;
}

// Calls visit(element, offset in memory) for each element of the matrix that this lane holds.
template <typename Fragment, typename Visit>
void each_element(Fragment& matrix, unsigned stride, bool columns_first, Visit visit) {
  for (int i = 0; i < Fragment::num_elements; ++i) {
    const unsigned at = cuda_emulation::lane() * Fragment::num_elements + i;
    const unsigned row = at / Fragment::kColumns, column = at % Fragment::kColumns;
    visit(matrix.x[i], columns_first ? row + column * stride : row * stride + column);
  }
}

template <typename Use, int M, int N, int K, typename T, typename Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& matrix, const T* memory, unsigned stride,
                      EmulatedLocation location = EmulatedLocation::current()) {
  __syncwarp(~0u, location);
  each_element(matrix, stride, std::is_same_v<Layout, col_major>,
               [=](T& x, unsigned offset) { x = memory[offset]; });
}
template <int M, int N, int K, typename T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& matrix, const T* memory, unsigned stride,
                      layout_t layout, EmulatedLocation location = EmulatedLocation::current()) {
  __syncwarp(~0u, location);
  each_element(matrix, stride, layout == mem_col_major,
               [=](T& x, unsigned offset) { x = memory[offset]; });
}
template <int M, int N, int K, typename T>
void store_matrix_sync(T* memory, const fragment<accumulator, M, N, K, T>& matrix, unsigned stride,
                       layout_t layout, EmulatedLocation location = EmulatedLocation::current()) {
  each_element(matrix, stride, layout == mem_col_major,
               [=](const T& x, unsigned offset) { memory[offset] = x; });
  __syncwarp(~0u, location);
}

// d = a * b + c
template <int M, int N, int K, typename T, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, M, N, K, float>& d,
              const fragment<matrix_a, M, N, K, T, LayoutA>& a,
              const fragment<matrix_b, M, N, K, T, LayoutB>& b,
              const fragment<accumulator, M, N, K, float>& c,
              EmulatedLocation location = EmulatedLocation::current()) {
  const unsigned lane = cuda_emulation::lane();
  auto& of_warp = factors[cuda_emulation::warp()];
  for (int i = 0; i < a.num_elements; ++i) {
    of_warp[0][lane * a.num_elements + i] = static_cast<float>(a.x[i]);
  }
  for (int i = 0; i < b.num_elements; ++i) {
    of_warp[1][lane * b.num_elements + i] = static_cast<float>(b.x[i]);
  }
  __syncwarp(~0u, location);
  for (int i = 0; i < d.num_elements; ++i) {
    const unsigned at = lane * d.num_elements + i;
    float sum = c.x[i];
    for (int k = 0; k < K; ++k) sum += of_warp[0][at / N * K + k] * of_warp[1][k * N + at % N];
    d.x[i] = sum;
  }
  __syncwarp(~0u, location);
}

}  // namespace nvcuda::wmma
