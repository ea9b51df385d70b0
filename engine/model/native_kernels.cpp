// Decode attention that follows slots itself, and the elementwise parts of a layer; no allocation but per-thread
// scratch, no global state. Compiled for this machine with HEAD_SIZE set. Called through ctypes with raw addresses.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef float Lanes __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Wide __attribute__((vector_size(32)));

constexpr int64_t kLanes = 8;
constexpr int64_t kVectors = HEAD_SIZE / kLanes;
static_assert(HEAD_SIZE % kLanes == 0, "the head size must be a multiple of 8");
// More accumulators than this do not fit into the registers beside what they are multiplied with.
constexpr int64_t kBlock = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 1;

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// A bfloat16 is the upper half of a float.
inline Lanes load(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, Wide) << 16);
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline float sum(Lanes lanes) {
  Four low, high;
  std::memcpy(&low, &lanes, sizeof low);
  std::memcpy(&high, (const char*)&lanes + sizeof low, sizeof high);
  low += high;
  return (low[0] + low[2]) + (low[1] + low[3]);
}

// e^x for x <= 0, to the last bits of a float: 2^n times a polynomial over half a unit around zero.
inline Lanes exponential(Lanes x) {
  x = x < -87.0f ? Lanes{} - 87.0f : x;
  const Lanes shifted = x * 1.44269504f - 0.5f;
  const Words power = __builtin_convertvector(shifted, Words);
  const Lanes whole = __builtin_convertvector(power, Lanes);
  const Lanes rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Lanes value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  return value * (Lanes)((power + 127) << 23);
}

template <typename Stored>
inline float dot(const float* query, const Stored* key) {
  Lanes even{}, odd{};
  for (int64_t at = 0; at + 1 < kVectors; at += 2) {
    even += load(query + at * kLanes) * load(key + at * kLanes);
    odd += load(query + (at + 1) * kLanes) * load(key + (at + 1) * kLanes);
  }
  if (kVectors % 2) even += load(query + HEAD_SIZE - kLanes) * load(key + HEAD_SIZE - kLanes);
  return sum(even + odd);
}

// Scores become weights that sum up to one; what pads the last vector becomes zero.
void softmax(float* scores, int64_t count) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  float most = scores[0];
  for (int64_t at = 1; at < count; ++at) most = scores[at] > most ? scores[at] : most;
  for (int64_t at = count; at < padded; ++at) scores[at] = most - 1e4f;
  Lanes total{};
  for (int64_t at = 0; at < padded; at += kLanes) {
    const Lanes weights = exponential(load(scores + at) - most);
    store(scores + at, weights);
    total += weights;
  }
  for (int64_t at = count; at < padded; ++at) scores[at] = 0;
  const float share = 1.0f / sum(total);
  for (int64_t at = 0; at < padded; at += kLanes) store(scores + at, load(scores + at) * share);
}

template <typename Stored>
void weigh(const float* weights, const Stored* values, const int64_t* slots, int64_t count, float* out) {
  for (int64_t first = 0; first < kVectors; first += kBlock) {
    Lanes sums[kBlock] = {};
    for (int64_t at = 0; at < count; ++at) {
      const Stored* value = values + slots[at] * HEAD_SIZE + first * kLanes;
      for (int64_t part = 0; part < kBlock; ++part) sums[part] += weights[at] * load(value + part * kLanes);
    }
    for (int64_t part = 0; part < kBlock; ++part) store(out + (first + part) * kLanes, sums[part]);
  }
}

template <typename Stored>
void attend(const float* query, int64_t query_stride, const Stored* keys, const Stored* values, const int64_t* slots,
            const int64_t* lengths, float* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t places,
            int64_t kv_stride, int64_t window, float scale) {
  const int64_t shared = heads / kv_heads;
  const int64_t row_scores = (places + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> scratch;
  if ((int64_t)scratch.size() < shared * row_scores) scratch.resize(shared * row_scores);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = window > 0 && lengths[row] > window ? lengths[row] - window : 0;
    const int64_t count = lengths[row] - first;
    const int64_t* seen = slots + row * places + first;
    for (int64_t head = 0; head < kv_heads; ++head) {
      const float* queries = query + row * query_stride + head * shared * HEAD_SIZE;
      const Stored* from = keys + head * kv_stride;
      float* scores = scratch.data();
      for (int64_t at = 0; at < count; ++at)
        for (int64_t one = 0; one < shared; ++one)
          scores[one * row_scores + at] = dot(queries + one * HEAD_SIZE, from + seen[at] * HEAD_SIZE) * scale;
      for (int64_t one = 0; one < shared; ++one) {
        float* weights = scores + one * row_scores;
        softmax(weights, count);
        weigh(weights, values + head * kv_stride, seen, count, out + (row * heads + head * shared + one) * HEAD_SIZE);
      }
    }
  }
}

}  // namespace

extern "C" {

void attend_float32(const float* query, int64_t query_stride, const float* keys, const float* values,
                    const int64_t* slots, const int64_t* lengths, float* out, int64_t rows, int64_t heads,
                    int64_t kv_heads, int64_t places, int64_t kv_stride, int64_t window, float scale) {
  attend(query, query_stride, keys, values, slots, lengths, out, rows, heads, kv_heads, places, kv_stride, window,
         scale);
}

void attend_bfloat16(const float* query, int64_t query_stride, const uint16_t* keys, const uint16_t* values,
                     const int64_t* slots, const int64_t* lengths, float* out, int64_t rows, int64_t heads,
                     int64_t kv_heads, int64_t places, int64_t kv_stride, int64_t window, float scale) {
  attend(query, query_stride, keys, values, slots, lengths, out, rows, heads, kv_heads, places, kv_stride, window,
         scale);
}

}
