// GEMM of few rows for compute capability 9.0: TMA fetches tiles of the weight to shared memory, and
// wgmma multiplies them from there.
//
// The kernel is bound by reading the weight. So a program fetches its first blocks before the kernel
// before has ended (programmatic dependent launch), and fetches as far ahead as shared memory
// reaches. Where tiles are few, the programs of a cluster split the inner dimension of one tile, and
// each adds up a part of the tile from the sums of all of them, always in the same order.
//
// wgmma takes 64 rows of its left operand, the weight, and any multiple of 8 of its right one. A
// warpgroup computes 64 rows of the weight for all rows of x.
//
// hopper.py puts `multiply` and these constants before this text, WIDENS if float8 is not ROUNDED:
// ROWS: at least the rows of x, a multiple of 8.    GROUPS: warpgroups of a program.
// STAGES: blocks in flight.                         RESIDENT: programs on a multiprocessor.
// SPLITS: programs of a tile.                       ADD: adds to the contents of out.
// GATED: the weight has gates, then ups, and the output is silu(gate) * up.
// INT8: weight and x are int8, x as two planes from `split_kernel`.
// FLOAT8: the weight is float8 (e4m3). If ROUNDED so is x. Else x is float16, in the order in which
// `split_kernel` stores it, and the weight becomes float16 on its way through registers.
// SCALE_ROWS: of 8 bits, 0: a row of the weight has one scale; else a block has, of so many rows and
// BLOCK_K columns.
//
// Sums of blocks with scales are added up as float32 outside of tensor cores. Others stay there, and
// of two float8 they have 14 bits, as by torch with `use_fast_accum`.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int LINE = 128;                            // bytes of a row of a block
constexpr bool SMALL = INT8 || FLOAT8;               // numbers of 8 bits
constexpr bool BY_BLOCK = SCALE_ROWS > 0;
constexpr int BEHIND = BY_BLOCK || WIDENS || STAGES < 4 ? 0 : 1;  // blocks that end beside the next
constexpr int BLOCK_K = SMALL ? LINE : LINE / 2;     // numbers
constexpr int PLANES = INT8 ? 2 : 1;                 // of x
constexpr int X_LINES = INT8 || WIDENS ? 2 : 1;      // of a row of x in a block
constexpr int WEIGHT_BYTES = 64 * LINE;              // of a warpgroup's block
constexpr int X_BYTES = ROWS * LINE;                 // of one of the lines
constexpr int STAGE_BYTES = GROUPS * WEIGHT_BYTES + X_LINES * X_BYTES;
constexpr int THREADS = GROUPS * 128;
constexpr int WIDTH = GROUPS * 64;                   // rows of the weight in a tile
constexpr int OUTPUTS = GATED ? WIDTH / 2 : WIDTH;   // of a tile
constexpr int SUMS = ROWS / 2;                       // of a thread and a plane
constexpr int STRIDE = WIDTH + 4;                    // of a row of sums: threads hit different banks
constexpr int FOURS = OUTPUTS / 4;                   // of a row: a thread ends four outputs at once
constexpr int ENDS = (ROWS * FOURS + SPLITS * THREADS - 1) / (SPLITS * THREADS);  // of a thread
constexpr int AT_ONCE = ENDS < 4 ? ENDS : 4;

__device__ __forceinline__ u32 shared_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}

// Barriers in shared memory. Each phase ends when as many threads and bytes as expected have come.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
  } while (!ended);
}

__device__ __forceinline__ void fetch(u32 to, const TensorMap *map, int k, int row, u32 barrier,
                                      u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row), "l"(policy) : "memory");
}
__device__ __forceinline__ u32 of_program(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void wait_for_the_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// A block for tensor cores: lines swizzled as TMA does, eight to 1,024 bytes.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float of_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ u32 to_bf16(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rounded(float x) { return of_bf16(to_bf16(x)); }
__device__ __forceinline__ float silu_mul(float gate, float up) {  // rounded as `silu_mul_kernel`
  gate = rounded(gate);
  return rounded(__fdividef(gate, 1.0f + __expf(-gate))) * rounded(up);
}
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ __forceinline__ float4 load_sums(u32 address, u32 split) {  // of a program of the tile
  float4 v;
  if (SPLITS > 1) address = of_program(address, split);
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float of_planes(const Sum *sums, int i) {
  return INT8 ? 256.0f * sums[i] + sums[SUMS * (PLANES - 1) + i] : sums[i];
}

// Four numbers of float8 as float16, a thread's of two steps of 8 columns.
__device__ __forceinline__ void widen(u32 four, u32 &first, u32 &second) {
  asm volatile("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo;"
               " cvt.rn.f16x2.e4m3x2 %1, hi; }" : "=r"(first), "=r"(second) : "r"(four));
}

// The compiler moves no access to registers across this.
__device__ __forceinline__ void keep(float &x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void keep(int &x) { asm volatile("" : "+r"(x)::"memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
hopper_gemm_kernel(const __grid_constant__ TensorMap weight_map,  // [N, K]; if GATED [2 * N, K]
                 const __grid_constant__ TensorMap x_map,  // [rows, K]; if INT8 [2 * rows, K]
                 const float *units,                       // [rows], read if SMALL
                 const float *scales,  // of a weight's rows or blocks, row by row, read if SMALL
                 u16 *out,                                 // bfloat16 [rows, N]
                 int rows, int N, int K) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * STAGES];
  const u32 start = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  const int tile = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, blocks = K / BLOCK_K;
  const int first = blocks * split / SPLITS, count = blocks * (split + 1) / SPLITS - first;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;

  u64 once, often;  // how long what is fetched stays in the cache
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
  auto stage = [&](int block) { return start + block % STAGES * STAGE_BYTES; };
  auto fetch_weight = [&](int block) {
    const u32 barrier = full + 8 * (block % STAGES);
    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int at = 0; at < WIDTH; at += 64) {
      const int row = tile * OUTPUTS + at % OUTPUTS + (at < OUTPUTS ? 0 : N);
      fetch(stage(block) + at * LINE, &weight_map, (first + block) * BLOCK_K, row, barrier, once);
    }
  };
  auto fetch_x = [&](int block) {
#pragma unroll
    for (int line = 0; line < X_LINES; ++line)
      fetch(stage(block) + GROUPS * WEIGHT_BYTES + line * X_BYTES, &x_map,
            (first + block) * BLOCK_K + (WIDENS ? line * LINE / 2 : 0), INT8 ? line * rows : 0,
            full + 8 * (block % STAGES), often);
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, THREADS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < min(count, STAGES); ++i) fetch_weight(i);
    asm volatile("griddepcontrol.launch_dependents;");
    wait_for_the_kernel_before();
    for (int i = 0; i < min(count, STAGES); ++i) fetch_x(i);
  }
  __syncthreads();

  Sum sums[PLANES * SUMS];  // [ROWS / 8, two rows of the weight, two of x], for each plane
  float total[SUMS];     // of all blocks, if BY_BLOCK
#pragma unroll
  for (int i = 0; i < SUMS; ++i) total[i] = 0.0f;
  const int at = group * 64, my_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int weight_row = tile * OUTPUTS + at % OUTPUTS + (at < OUTPUTS ? 0 : N) + my_row;
  auto scale_of = [&](int row, int block) {
    return __ldg(scales + (u64)(row / max(SCALE_ROWS, 1)) * (K / BLOCK_K) + first + block);
  };
  float scale_ahead[2] = {1.0f, 1.0f};  // of the thread's two rows, in the block that comes next
  if (SCALE_ROWS > 0 && count > 0) {
    scale_ahead[0] = scale_of(weight_row, 0);
    scale_ahead[1] = scale_of(weight_row + 8, 0);
  }
  for (int block = 0; block < count; ++block) {
    const float scale[2] = {scale_ahead[0], scale_ahead[1]};
    if (SCALE_ROWS > 0 && block + 1 < count) {
      scale_ahead[0] = scale_of(weight_row, block + 1);
      scale_ahead[1] = scale_of(weight_row + 8, block + 1);
    }
    barrier_wait(full + 8 * (block % STAGES), block / STAGES & 1);
    const bool adds = !BY_BLOCK && block > 0;  // to sums, which begin without a value
    const u64 weight = operand(stage(block) + group * WEIGHT_BYTES);
    const u64 x = operand(stage(block) + GROUPS * WEIGHT_BYTES);
#if WIDENS
    // A thread has 32 adjacent columns of two rows. The order of x makes them its columns of
    // wgmma's eight steps of 16.
    u32 wide[8][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 chunk = (lane % 4 * 2 + i / 2) ^ (lane / 4);  // of 16 bytes, swizzled
      const u32 line = stage(block) + group * WEIGHT_BYTES + (my_row + i % 2 * 8) * LINE;
      u32 four[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                   : "r"(line + 16 * chunk) : "memory");
#pragma unroll
      for (int step = 0; step < 4; ++step)
        widen(four[step], wide[i / 2 * 4 + step][i % 2], wide[i / 2 * 4 + step][2 + i % 2]);
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 8; ++step)
      multiply(sums, wide[step], x + (step / 4 * X_BYTES + step % 4 * 32) / 16, adds || step > 0);
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int bytes = 0; bytes < LINE; bytes += 32)
      multiply(sums, weight + bytes / 16, x + bytes / 16, adds || bytes > 0);
#endif
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    const int last = block - 1 - BEHIND, next = last + STAGES;  // `next` comes where `last` was
    if (threadIdx.x == 0 && last >= 0 && next < count) {
      barrier_wait(empty + 8 * (next % STAGES), (next / STAGES - 1) & 1);
      fetch_weight(next);
      fetch_x(next);
    }
    __syncwarp();
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BEHIND) : "memory");
    if (lane == 0 && block >= BEHIND) barrier_arrive(empty + 8 * ((block - BEHIND) % STAGES));
    if (BY_BLOCK) {
#pragma unroll
      for (int i = 0; i < PLANES * SUMS; ++i) keep(sums[i]);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) total[i] += scale[i / 2 % 2] * of_planes(sums, i);
    }
  }

  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < PLANES * SUMS; ++i) keep(sums[i]);
  wait_for_the_kernel_before();
  __syncthreads();  // no block is needed any more: [ROWS, STRIDE] of sums take their place
  float *left = (float *)(memory + (start - shared_address(memory)));
  left += threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
    left[(i / 4 * 8 + lane % 4 * 2 + i % 2) * STRIDE + i / 2 % 2 * 8] =
        BY_BLOCK ? total[i] : of_planes(sums, i);
  if (SPLITS > 1) cluster_meets(); else __syncthreads();

#pragma unroll
  for (int begin = 0; begin < ENDS; begin += AT_ONCE) {
    float4 parts[AT_ONCE][SPLITS], up_parts[AT_ONCE][SPLITS], scale[AT_ONCE], up_scale[AT_ONCE];
    uint2 old[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int four = ((begin + i) * SPLITS + split) * THREADS + threadIdx.x;
      const int row = four / FOURS, column = four % FOURS * 4, n = tile * OUTPUTS + column;
      if (row >= rows) continue;
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) {
        parts[i][s] = load_sums(start + 4 * (row * STRIDE + column), s);
        if (GATED) up_parts[i][s] = load_sums(start + 4 * (row * STRIDE + OUTPUTS + column), s);
      }
      if (SMALL) {
        const float unit = units[row];
        scale[i] = up_scale[i] = {unit, unit, unit, unit};
        if (SCALE_ROWS == 0) {
          scale[i] = scale[i] * *(const float4 *)(scales + n);
          if (GATED) up_scale[i] = up_scale[i] * *(const float4 *)(scales + N + n);
        }
      }
      if (ADD) old[i] = *(const uint2 *)(out + (u64)row * N + n);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int four = ((begin + i) * SPLITS + split) * THREADS + threadIdx.x;
      const int row = four / FOURS, n = tile * OUTPUTS + four % FOURS * 4;
      if (row >= rows) continue;
      float4 y = parts[i][0], up = up_parts[i][0];
#pragma unroll
      for (int s = 1; s < SPLITS; ++s) {
        y = y + parts[i][s];
        if (GATED) up = up + up_parts[i][s];
      }
      if (SMALL) y = y * scale[i];
      if (SMALL && GATED) up = up * up_scale[i];
      if (GATED)
        y = {silu_mul(y.x, up.x), silu_mul(y.y, up.y), silu_mul(y.z, up.z), silu_mul(y.w, up.w)};
      if (ADD)
        y = y + float4{of_bf16(old[i].x & 0xffff), of_bf16(old[i].x >> 16),
                       of_bf16(old[i].y & 0xffff), of_bf16(old[i].y >> 16)};
      *(uint2 *)(out + (u64)row * N + n) = {to_bf16(y.x) | to_bf16(y.y) << 16,
                                            to_bf16(y.z) | to_bf16(y.w) << 16};
    }
  }
  if (SPLITS > 1) cluster_meets();  // none leaves whose sums another reads
}
