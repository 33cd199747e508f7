#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

// Products of 16 x 16 matrices by tensor cores, of float16 or bfloat16, summed in float32.
namespace h2o::cuda {

inline constexpr int kMatrix = 16;
inline constexpr int kRowPadding =
    8;  // elements of shared memory, so that rows begin in other banks

template <typename T>
struct MatrixElement;
template <>
struct MatrixElement<c10::Half> {
  using Type = half;
};
template <>
struct MatrixElement<c10::BFloat16> {
  using Type = __nv_bfloat16;
};

template <typename T>
using MatrixA = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kMatrix, kMatrix, kMatrix,
                                       typename MatrixElement<T>::Type, nvcuda::wmma::row_major>;
template <typename T, typename Layout>
using MatrixB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kMatrix, kMatrix, kMatrix,
                                       typename MatrixElement<T>::Type, Layout>;
using MatrixSum =
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kMatrix, kMatrix, kMatrix, float>;

template <typename T>
__device__ __forceinline__ const typename MatrixElement<T>::Type* matrix_elements(
    const T* elements) {
  return reinterpret_cast<const typename MatrixElement<T>::Type*>(elements);
}

}  // namespace h2o::cuda
