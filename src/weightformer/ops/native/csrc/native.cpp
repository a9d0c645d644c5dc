// The block's two passes for a CPU: depthwise convolution with residual and LayerNorm, and the MLP in row blocks.
//
// Float32, channels-last tokens, contiguous. Vectors are the compiler's own (GCC and Clang), as wide as the machine that
// builds this has; nothing here names an instruction.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTileRows = 12;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kTileRows = 6;
#else
constexpr int64_t kLanes = 4, kTileRows = 4;
#endif
constexpr int64_t kPanel = 2 * kLanes;          // columns of a packed panel
constexpr int64_t kBlockRows = 8 * kTileRows;   // tokens whose hidden layer stays in a core's second-level cache

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec fill(float x) { return x - Vec{}; }
inline Vec clamp(Vec x, float limit) {
  x = x > fill(limit) ? fill(limit) : x;
  return x < fill(-limit) ? fill(-limit) : x;
}

// x P(x^2) / Q(x^2), fitted to odd functions that saturate at `limit`.
inline Vec odd_rational(Vec x, float limit, const float (&p)[6], const float (&q)[5]) {
  x = clamp(x, limit);
  const Vec s = x * x;
  Vec above = fill(p[5]), below = fill(q[4]);
  for (int i = 4; i >= 0; --i) above = above * s + p[i];
  for (int i = 3; i >= 0; --i) below = below * s + q[i];
  return clamp(x * above / (below * s + 1.0f), 1.0f);
}

// Largest error 4e-7.
inline Vec erf(Vec x) {
  static constexpr float p[] = {1.1283790325f, 0.1919405145f, 0.05296684555f, 3.8368487648e-3f, 2.8745546391e-4f, 2.0503778346e-6f};
  static constexpr float q[] = {0.5034346308f, 0.1147579879f, 0.01510915641f, 1.1817252795e-3f, 3.8230545909e-5f};
  return odd_rational(x, 3.9f, p, q);
}

// Largest error 3e-7.
inline Vec tanh(Vec x) {
  static constexpr float p[] = {0.9999999999f, 0.1411526917f, 4.4474145581e-3f, 4.2832500686e-5f, 1.1445111169e-7f, 3.8856386502e-11f};
  static constexpr float q[] = {0.4744860246f, 0.02927609004f, 5.0497940984e-4f, 2.6562292552e-6f, 3.0744023328e-9f};
  return odd_rational(x, 8.5f, p, q);
}

inline Vec gelu(Vec x, bool approximate) {
  if (approximate) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erf(0.7071067812f * x));
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- depthwise convolution ------------------------------------------------------------------------------------------

// One token: the sum of its neighbours under the kernel, plus bias and, with `residual`, itself.
// `taps` holds (K * K, C): one row a tap.
void convolve_token(const float* image, const float* taps, const float* bias, float* out, int64_t h, int64_t w,
                    int64_t height, int64_t width, int64_t channels, int64_t size, bool residual) {
  const int64_t r = size / 2;
  const float* centre = image + (h * width + w) * channels;
  const int64_t i0 = std::max<int64_t>(0, r - h), i1 = std::min(size, height + r - h);
  const int64_t j0 = std::max<int64_t>(0, r - w), j1 = std::min(size, width + r - w);
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    Vec sum = bias ? load(bias + c) : Vec{};
    if (residual) sum += load(centre + c);
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t j = j0; j < j1; ++j)
        sum += load(centre + ((i - r) * width + (j - r)) * channels + c) * load(taps + (i * size + j) * channels + c);
    store(out + c, sum);
  }
  for (; c < channels; ++c) {
    float sum = (bias ? bias[c] : 0.0f) + (residual ? centre[c] : 0.0f);
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t j = j0; j < j1; ++j)
        sum += centre[((i - r) * width + (j - r)) * channels + c] * taps[(i * size + j) * channels + c];
    out[c] = sum;
  }
}

void normalize_token(const float* z, const float* weight, const float* shift, float* out, int64_t channels, float eps,
                     float* mean_out, float* rstd_out) {
  float sum = 0.0f, squares = 0.0f;
  for (int64_t c = 0; c < channels; ++c) sum += z[c];
  const float mean = sum / channels;
  for (int64_t c = 0; c < channels; ++c) squares += (z[c] - mean) * (z[c] - mean);
  const float rstd = 1.0f / std::sqrt(squares / channels + eps);
  for (int64_t c = 0; c < channels; ++c) out[c] = (z[c] - mean) * rstd * weight[c] + shift[c];
  *mean_out = mean;
  *rstd_out = rstd;
}

// (C, K, K) or (B, C, K, K) to one row a tap, (K * K, C) for each image.
Tensor taps_of(const Tensor& kernel) { return kernel.flatten(-2).transpose(-1, -2).contiguous(); }

struct Grid {
  explicit Grid(const Tensor& x) : batch(x.size(0)), height(x.size(1)), width(x.size(2)), channels(x.size(3)) {}
  int64_t batch, height, width, channels;
  int64_t image() const { return height * width * channels; }
};

// A grain such that a few tokens are not spread over threads.
int64_t grain(int64_t items, int64_t work_an_item) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work_an_item)); }

Tensor depthwise(const Tensor& x_, const Tensor& kernel, const std::optional<Tensor>& bias_, bool residual) {
  const Tensor x = x_.contiguous(), taps = taps_of(kernel);
  const Tensor bias = bias_ ? bias_->contiguous() : Tensor();
  Tensor out = at::empty_like(x);
  const Grid g(x);
  const int64_t size = kernel.size(-1), image_taps = kernel.dim() == 4 ? size * size * g.channels : 0;
  const float *px = x.const_data_ptr<float>(), *pt = taps.const_data_ptr<float>();
  const float* pb = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  float* po = out.mutable_data_ptr<float>();
  at::parallel_for(0, g.batch * g.height, grain(g.batch * g.height, g.width * g.channels), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / g.height, h = row % g.height;
      for (int64_t w = 0; w < g.width; ++w)
        convolve_token(px + b * g.image(), pt + b * image_taps, pb, po + (row * g.width + w) * g.channels, h, w,
                       g.height, g.width, g.channels, size, residual);
    }
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> depthwise_norm(const Tensor& x_, const Tensor& kernel, const Tensor& bias_,
                                                          const Tensor& weight_, const Tensor& shift_, double eps) {
  const Tensor x = x_.contiguous(), taps = taps_of(kernel), bias = bias_.contiguous();
  const Tensor weight = weight_.contiguous(), shift = shift_.contiguous();
  Tensor z = at::empty_like(x), normed = at::empty_like(x);
  const Grid g(x);
  Tensor mean = at::empty({g.batch, g.height, g.width, 1}, x.options()), rstd = at::empty_like(mean);
  const int64_t size = kernel.size(-1), image_taps = kernel.dim() == 4 ? size * size * g.channels : 0;
  const float *px = x.const_data_ptr<float>(), *pt = taps.const_data_ptr<float>(), *pb = bias.const_data_ptr<float>();
  const float *pw = weight.const_data_ptr<float>(), *ps = shift.const_data_ptr<float>();
  float *pz = z.mutable_data_ptr<float>(), *pn = normed.mutable_data_ptr<float>();
  float *pm = mean.mutable_data_ptr<float>(), *pr = rstd.mutable_data_ptr<float>();
  at::parallel_for(0, g.batch * g.height, grain(g.batch * g.height, g.width * g.channels), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / g.height, h = row % g.height;
      for (int64_t w = 0; w < g.width; ++w) {
        const int64_t token = row * g.width + w, at = token * g.channels;
        convolve_token(px + b * g.image(), pt + b * image_taps, pb, pz + at, h, w, g.height, g.width, g.channels, size, true);
        normalize_token(pz + at, pw, ps, pn + at, g.channels, static_cast<float>(eps), pm + token, pr + token);
      }
    }
  });
  return {z, normed, mean, rstd};
}

// The gradient of the kernel, (B, C, K, K): image b's input against its gradient, one shift a tap.
Tensor depthwise_kernel_grad(const Tensor& x_, const Tensor& grad_, int64_t size) {
  const Tensor x = x_.contiguous(), grad = grad_.contiguous();
  const Grid g(x);
  const int64_t r = size / 2, groups = (g.channels + kLanes - 1) / kLanes;
  Tensor taps = at::zeros({g.batch, size * size, g.channels}, x.options());
  const float *px = x.const_data_ptr<float>(), *pg = grad.const_data_ptr<float>();
  float* pt = taps.mutable_data_ptr<float>();
  at::parallel_for(0, g.batch * groups, grain(g.batch * groups, g.height * g.width * kLanes), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / groups, c0 = item % groups * kLanes, lanes = std::min(kLanes, g.channels - c0);
      const float *image = px + b * g.image() + c0, *out = pg + b * g.image() + c0;
      float* sums = pt + b * size * size * g.channels + c0;
      for (int64_t i = 0; i < size; ++i)
        for (int64_t j = 0; j < size; ++j) {
          float* sum = sums + (i * size + j) * g.channels;
          const int64_t w0 = std::max<int64_t>(0, r - j), w1 = std::min(g.width, g.width + r - j);
          for (int64_t h = std::max<int64_t>(0, r - i); h < std::min(g.height, g.height + r - i); ++h) {
            const float *a = image + ((h + i - r) * g.width + j - r) * g.channels, *d = out + h * g.width * g.channels;
            if (lanes == kLanes) {  // a row's sum before the image's: less rounding over many tokens
              Vec partial{};
              for (int64_t w = w0; w < w1; ++w) partial += load(a + w * g.channels) * load(d + w * g.channels);
              store(sum, load(sum) + partial);
            } else {
              for (int64_t w = w0; w < w1; ++w)
                for (int64_t c = 0; c < lanes; ++c) sum[c] += a[w * g.channels + c] * d[w * g.channels + c];
            }
          }
        }
    }
  });
  return taps.transpose(1, 2).unflatten(2, {size, size});
}

// ---- matrix products ------------------------------------------------------------------------------------------------

// (K, N) with any strides to panels of kPanel columns, (N / kPanel, K, kPanel), the last one padded with zeros.
void pack(const float* b, int64_t k, int64_t n, int64_t stride_k, int64_t stride_n, float* out) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  at::parallel_for(0, panels, grain(panels, k * kPanel), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t n0 = p * kPanel, columns = std::min(kPanel, n - n0);
      for (int64_t i = 0; i < k; ++i) {
        float* row = out + (p * k + i) * kPanel;
        const float* from = b + i * stride_k + n0 * stride_n;
        for (int64_t j = 0; j < columns; ++j) row[j] = from[j * stride_n];
        for (int64_t j = columns; j < kPanel; ++j) row[j] = 0.0f;
      }
    }
  });
}

// Rows x kPanel of A B + bias, A with row stride lda, B a packed panel.
template <int Rows>
inline void multiply(const float* a, int64_t lda, const float* panel, int64_t k, const float* bias, Vec (&sum)[kTileRows][2]) {
  Vec acc[Rows][2];
  for (int r = 0; r < Rows; ++r) acc[r][0] = load(bias), acc[r][1] = load(bias + kLanes);
  for (int64_t i = 0; i < k; ++i) {
    const Vec b0 = load(panel + i * kPanel), b1 = load(panel + i * kPanel + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec x = fill(a[r * lda + i]);
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
  for (int r = 0; r < Rows; ++r) sum[r][0] = acc[r][0], sum[r][1] = acc[r][1];
}

// Rows below a full tile, one at a time.
void multiply_rows(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t k, const float* bias, Vec (&sum)[kTileRows][2]) {
  if (rows == kTileRows) return multiply<kTileRows>(a, lda, panel, k, bias, sum);
  int64_t r = 0;
  Vec part[kTileRows][2];
  for (; r + 4 <= rows; r += 4) {
    multiply<4>(a + r * lda, lda, panel, k, bias, part);
    for (int i = 0; i < 4; ++i) sum[r + i][0] = part[i][0], sum[r + i][1] = part[i][1];
  }
  for (; r < rows; ++r) {
    multiply<1>(a + r * lda, lda, panel, k, bias, part);
    sum[r][0] = part[0][0], sum[r][1] = part[0][1];
  }
}

// Every tile of `rows` x n of A B + bias, handed to `finish(row, first column, columns, values)`.
template <typename Finish>
void product(int64_t rows, const float* a, int64_t lda, const float* packed, int64_t k, int64_t n, const float* bias, Finish finish) {
  Vec sum[kTileRows][2];
  for (int64_t n0 = 0; n0 < n; n0 += kPanel)
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      const int64_t tile = std::min(kTileRows, rows - r0);
      multiply_rows(tile, a + r0 * lda, lda, packed + n0 * k, k, bias + n0, sum);
      for (int64_t r = 0; r < tile; ++r) finish(r0 + r, n0, sum[r]);
    }
}

inline void store_columns(float* out, int64_t columns, const Vec (&values)[2]) {
  if (columns >= kPanel) {
    store(out, values[0]);
    store(out + kLanes, values[1]);
  } else {
    std::copy_n(reinterpret_cast<const float*>(values), columns, out);
  }
}

std::vector<float> padded(const Tensor& bias, int64_t to) {
  std::vector<float> out(to, 0.0f);
  std::copy_n(bias.const_data_ptr<float>(), bias.numel(), out.data());
  return out;
}

// x + gelu(y w1 + b1) w2 + b2 for G groups of M tokens (G, M, C), w1 (G, C, O) and w2 (C, O). With `keep`, the second
// result is the first product (G, M, O); else it is empty.
std::tuple<Tensor, Tensor> mlp(const std::optional<Tensor>& x_, const Tensor& y_, const Tensor& w1, const Tensor& b1_,
                               const Tensor& w2, const Tensor& b2_, bool approximate, bool keep) {
  const Tensor y = y_.contiguous(), x = x_ ? x_->contiguous() : Tensor();
  const Tensor b1 = b1_.contiguous(), b2 = b2_.contiguous();
  const int64_t groups = y.size(0), tokens = y.size(1), channels = y.size(2), hidden = w1.size(2);
  const int64_t hidden_padded = round_up(hidden, kPanel), channels_padded = round_up(channels, kPanel);
  Tensor out = at::empty_like(y);
  Tensor kept = at::empty({keep ? groups : 0, tokens, hidden}, y.options());
  const std::vector<float> bias1 = padded(b1, hidden_padded), bias2 = padded(b2, channels_padded);
  const Tensor packed1 = at::empty({channels * hidden_padded}, y.options());
  const Tensor packed2 = at::empty({hidden * channels_padded}, y.options());
  float *p1 = packed1.mutable_data_ptr<float>(), *p2 = packed2.mutable_data_ptr<float>();
  pack(w2.const_data_ptr<float>(), hidden, channels, w2.stride(1), w2.stride(0), p2);
  for (int64_t g = 0; g < groups; ++g) {
    pack(w1.const_data_ptr<float>() + g * w1.stride(0), channels, hidden, w1.stride(1), w1.stride(2), p1);
    const float* py = y.const_data_ptr<float>() + g * tokens * channels;
    const float* px = x.defined() ? x.const_data_ptr<float>() + g * tokens * channels : nullptr;
    float* po = out.mutable_data_ptr<float>() + g * tokens * channels;
    float* ph = keep ? kept.mutable_data_ptr<float>() + g * tokens * hidden : nullptr;
    at::parallel_for(0, (tokens + kBlockRows - 1) / kBlockRows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> workspace(kBlockRows * hidden_padded);
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlockRows, rows = std::min(kBlockRows, tokens - first);
        product(rows, py + first * channels, channels, p1, channels, hidden, bias1.data(),
                [&](int64_t r, int64_t n0, const Vec(&values)[2]) {
                  if (ph) store_columns(ph + (first + r) * hidden + n0, hidden - n0, values);
                  const Vec activated[2] = {gelu(values[0], approximate), gelu(values[1], approximate)};
                  store_columns(workspace.data() + r * hidden_padded + n0, kPanel, activated);
                });
        product(rows, workspace.data(), hidden_padded, p2, hidden, channels, bias2.data(),
                [&](int64_t r, int64_t n0, const Vec(&values)[2]) {
                  const int64_t at = (first + r) * channels + n0, columns = channels - n0;
                  if (px && columns >= kPanel) {
                    const Vec sums[2] = {values[0] + load(px + at), values[1] + load(px + at + kLanes)};
                    store_columns(po + at, columns, sums);
                  } else {
                    store_columns(po + at, columns, values);
                    if (px)
                      for (int64_t c = 0; c < columns; ++c) po[at + c] += px[at + c];
                  }
                });
      }
    });
  }
  return {out, kept};
}

}  // namespace

TORCH_LIBRARY(weightformer_native, m) {
  m.def("depthwise(Tensor x, Tensor kernel, Tensor? bias, bool residual) -> Tensor");
  m.def("depthwise_kernel_grad(Tensor x, Tensor grad, int size) -> Tensor");
  m.def(
      "depthwise_norm(Tensor x, Tensor kernel, Tensor bias, Tensor weight, Tensor shift, float eps) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "mlp(Tensor? x, Tensor y, Tensor w1, Tensor b1, Tensor w2, Tensor b2, bool approximate, bool keep) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(weightformer_native, CPU, m) {
  m.impl("depthwise", &depthwise);
  m.impl("depthwise_kernel_grad", &depthwise_kernel_grad);
  m.impl("depthwise_norm", &depthwise_norm);
  m.impl("mlp", &mlp);
}
