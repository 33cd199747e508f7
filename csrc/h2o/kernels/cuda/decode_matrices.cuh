#pragma once

#include "h2o/kernels/cuda/decode_block.cuh"
#include "h2o/kernels/cuda/matrix.cuh"

// A decode step's arithmetic for large groups of query heads and 16-bit types, by tensor cores: a
// group's queries are the rows of a matrix, a warp's slots the columns. Weights are rounded to the
// type for the products with V; the scores are made of those that are not.
namespace h2o::cuda {

inline constexpr int kMatrixDims = 64;    // of head_dim, at once
inline constexpr int kMatrixHeads = 64;   // query heads whose logits a warp keeps at once
inline constexpr int kWeighedHeads = 16;  // query heads whose outputs a warp keeps at once
inline constexpr int kLogitStride = kMatrix + 4;

// What a warp has for itself between two barriers.
template <typename T>
struct alignas(32) MatrixWarp {
  T slots[kMatrix][kMatrixDims + kRowPadding];  // keys or values
  union {
    float logits[kMatrix][kLogitStride];
    T weights[kWeighedHeads][kMatrix + kRowPadding];
  };
};

template <typename T>
struct DecodeMatrices : DecodeBlock<T, DecodeMatrices<T>> {
  using Block = DecodeBlock<T, DecodeMatrices>;
  using Block::group_size, Block::head, Block::head_dim, Block::lane, Block::memory,
      Block::new_position, Block::plan, Block::q_head, Block::row, Block::step,
      Block::weighted_slots, Block::weights;
  static constexpr int kHeadTile = kMatrix;

  // The warps' own memory and, in the same place, their sums of one matrix of heads; then the
  // queries in their own type.
  static constexpr int kWarpElements = kMatrix * kMatrixDims;
  static_assert(sizeof(MatrixWarp<T>) <= kWarpElements * sizeof(float));

  static DecodeTile tile(const Sizes& sizes) {
    const int32_t padded_dim = rounded_up(sizes.head_dim, kMatrixDims);
    const int64_t queries =
        int64_t{rounded_up(sizes.group_size, kMatrix)} * (padded_dim + kRowPadding);
    return {kWarpSize, padded_dim, kMatrix, kMaxWarps * kWarpElements + queries / 2};
  }

  __device__ DecodeMatrices(const DecodeStep<T>& step, const DecodePlan& plan)
      : Block(step, plan) {}

  __device__ float* sums() const { return memory + plan.work; }
  __device__ MatrixWarp<T>& warp_memory() const {
    return *reinterpret_cast<MatrixWarp<T>*>(sums() + threadIdx.x / kWarpSize * kWarpElements);
  }
  __device__ T* queries() const { return reinterpret_cast<T*>(sums() + kMaxWarps * kWarpElements); }
  __device__ int32_t query_stride() const { return plan.padded_dim + kRowPadding; }

  // The thread's own from among those that the block has just loaded.
  __device__ void load_own_queries() const {
    const int32_t elements = rounded_up(group_size(), kMatrix) * plan.padded_dim;
    for (int32_t i = threadIdx.x; i < elements; i += blockDim.x) {
      queries()[i / plan.padded_dim * query_stride() + i % plan.padded_dim] =
          static_cast<T>(memory[i]);
    }
  }

  // Copies elements first_dim .. + kMatrixDims of the warp's slots first .. + kMatrix to its
  // memory; 0 where a slot is empty, whose contents may be anything.
  __device__ void load_slots(const View<T>& cache, const WarpSlots& slots, int32_t first,
                             int32_t first_dim) const {
    constexpr int kVector = kVectorSize<T>, kVectors = kMatrixDims / kVector;
    using Loaded = Vector<T, kVector>;
    MatrixWarp<T>& own = warp_memory();
    __syncwarp();
#pragma unroll
    for (int32_t turn = 0; turn < kMatrix * kVectors / kWarpSize; ++turn) {
      const int32_t i = (turn * kWarpSize + lane) / kVectors;
      const int32_t within = (turn * kWarpSize + lane) % kVectors * kVector;
      const int32_t d = first_dim + within;
      Loaded loaded = {};
      if ((slots.occupied >> (first + i) & 1u) != 0 && d < head_dim()) {
        load_vector(loaded, cache.at(row, head, slots.first + first + i) + d, step.aligned,
                    head_dim() - d);
      }
      *reinterpret_cast<Loaded*>(&own.slots[i][within]) = loaded;
    }
    __syncwarp();
  }

  __device__ void write_logits(const WarpSlots& slots, int32_t own_position) const {
    constexpr int kTiles = kMatrixHeads / kMatrix;
    MatrixWarp<T>& own = warp_memory();
    for (int32_t first = 0; first < kWarpSize; first += kMatrix) {
      for (int32_t first_head = 0; first_head < group_size(); first_head += kMatrixHeads) {
        MatrixSum logits[kTiles];
#pragma unroll
        for (MatrixSum& of_tile : logits) nvcuda::wmma::fill_fragment(of_tile, 0.0f);
        for (int32_t first_dim = 0; first_dim < plan.padded_dim; first_dim += kMatrixDims) {
          load_slots(step.cache.k, slots, first, first_dim);
#pragma unroll 1
          for (int32_t d = 0; d < kMatrixDims; d += kMatrix) {
            MatrixB<T, nvcuda::wmma::col_major> keys;
            nvcuda::wmma::load_matrix_sync(keys, matrix_elements(&own.slots[0][d]),
                                           kMatrixDims + kRowPadding);
#pragma unroll
            for (int32_t tile = 0; tile < kTiles; ++tile) {
              const int32_t g = first_head + tile * kMatrix;
              if (g >= group_size()) continue;
              MatrixA<T> of_heads;
              nvcuda::wmma::load_matrix_sync(
                  of_heads, matrix_elements(queries() + g * query_stride() + first_dim + d),
                  query_stride());
              nvcuda::wmma::mma_sync(logits[tile], of_heads, keys, logits[tile]);
            }
          }
        }
#pragma unroll
        for (int32_t tile = 0; tile < kTiles; ++tile) {
          if (first_head + tile * kMatrix >= group_size()) continue;
          __syncwarp();
          nvcuda::wmma::store_matrix_sync(&own.logits[0][0], logits[tile], kLogitStride,
                                          nvcuda::wmma::mem_row_major);
          __syncwarp();
#pragma unroll 1
          for (int32_t turn = 0; turn < kMatrix * kMatrix / kWarpSize; ++turn) {
            const int32_t h = (turn * kWarpSize + lane) / kMatrix, i = lane % kMatrix;
            const int32_t g = first_head + tile * kMatrix + h;
            const int32_t slot_position = __shfl_sync(kAllLanes, own_position, first + i);
            if (g >= group_size() || slot_position < 0) continue;
            weights(g)[slots.index + first + i] =
                step.terms.logit(own.logits[h][i], q_head(g), slot_position, new_position);
          }
        }
      }
    }
  }

  template <typename Emit>
  __device__ void weigh_values(int32_t range, Emit emit) const {
    constexpr int kHeadTiles = kWeighedHeads / kMatrix, kDimTiles = kMatrixDims / kMatrix;
    const WarpSlots slots = weighted_slots(range);
    MatrixWarp<T>& own = warp_memory();
    for (int32_t first_head = 0; first_head < group_size(); first_head += kWeighedHeads) {
      for (int32_t first_dim = 0; first_dim < plan.padded_dim; first_dim += kMatrixDims) {
        MatrixSum outputs[kHeadTiles][kDimTiles];
#pragma unroll
        for (auto& of_heads : outputs) {
#pragma unroll
          for (MatrixSum& output : of_heads) nvcuda::wmma::fill_fragment(output, 0.0f);
        }
        for (int32_t first = 0; slots.occupied != 0 && first < kWarpSize; first += kMatrix) {
          load_slots(step.cache.v, slots, first, first_dim);
          for (int32_t i = lane; i < kWeighedHeads * kMatrix; i += kWarpSize) {
            const int32_t h = i / kMatrix, g = first_head + h;
            const int32_t slot = slots.index + first + i % kMatrix;
            own.weights[h][i % kMatrix] =
                static_cast<T>(g < group_size() ? weights(g)[slot] : 0.0f);
          }
          __syncwarp();
#pragma unroll
          for (int32_t d = 0; d < kDimTiles; ++d) {
            MatrixB<T, nvcuda::wmma::row_major> values;
            nvcuda::wmma::load_matrix_sync(values, matrix_elements(&own.slots[0][d * kMatrix]),
                                           kMatrixDims + kRowPadding);
#pragma unroll
            for (int32_t tile = 0; tile < kHeadTiles; ++tile) {
              MatrixA<T> of_heads;
              nvcuda::wmma::load_matrix_sync(of_heads,
                                             matrix_elements(&own.weights[tile * kMatrix][0]),
                                             kMatrix + kRowPadding);
              nvcuda::wmma::mma_sync(outputs[tile][d], of_heads, values, outputs[tile][d]);
            }
          }
        }
#pragma unroll
        for (int32_t tile = 0; tile < kHeadTiles; ++tile) {
          __syncthreads();
          float* const of_warp = sums() + threadIdx.x / kWarpSize * kWarpElements;
#pragma unroll
          for (int32_t d = 0; d < kDimTiles; ++d) {
            nvcuda::wmma::store_matrix_sync(of_warp + d * kMatrix, outputs[tile][d], kMatrixDims,
                                            nvcuda::wmma::mem_row_major);
          }
          __syncthreads();
          for (int32_t i = threadIdx.x; i < kMatrix * kMatrixDims; i += blockDim.x) {
            const int32_t g = first_head + tile * kMatrix + i / kMatrixDims;
            const int32_t d = first_dim + i % kMatrixDims;
            if (g >= group_size() || d >= head_dim()) continue;
            float of_block = sums()[i];
            for (unsigned warp = 1; warp < blockDim.x / kWarpSize; ++warp) {
              of_block += sums()[warp * kWarpElements + i];
            }
            emit(g, d, of_block);
          }
        }
        __syncthreads();
      }
    }
  }
};

}  // namespace h2o::cuda
