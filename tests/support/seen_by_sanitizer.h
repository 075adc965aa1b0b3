// Before few_rows.cpp, so that AddressSanitizer sees what its masked instructions and AMX read and write, which are not
// C++ to it: each byte is touched by C++ as well.

#include <cstdint>

inline void see_bytes(const void* memory, int64_t count) {
  for (int64_t i = 0; i < count; ++i) (void)static_cast<const volatile char*>(memory)[i];
}

#ifdef __AVX512F__
#include <immintrin.h>

// The elements of so many bytes that a mask names.
template <typename Mask>
const void* seen(const void* memory, Mask mask, int bytes) {
  for (int i = 0; i < static_cast<int>(8 * sizeof(Mask)); ++i)
    if (mask >> i & 1) see_bytes(static_cast<const char*>(memory) + i * bytes, bytes);
  return memory;
}

#define _mm512_maskz_loadu_ps(mask, from) _mm512_maskz_loadu_ps(mask, seen<__mmask16>(from, mask, 4))
#define _mm512_maskz_loadu_epi16(mask, from) _mm512_maskz_loadu_epi16(mask, seen<__mmask32>(from, mask, 2))
#define _mm512_mask_loadu_ps(old, mask, from) _mm512_mask_loadu_ps(old, mask, seen<__mmask16>(from, mask, 4))
#define _mm512_mask_loadu_epi8(old, mask, from) _mm512_mask_loadu_epi8(old, mask, seen<__mmask64>(from, mask, 1))
#define _mm512_mask_loadu_epi16(old, mask, from) _mm512_mask_loadu_epi16(old, mask, seen<__mmask32>(from, mask, 2))
#define _mm512_mask_storeu_ps(to, mask, values) (seen<__mmask16>(to, mask, 4), _mm512_mask_storeu_ps(to, mask, values))
#define _mm512_mask_storeu_epi16(to, mask, values) \
  (seen<__mmask32>(to, mask, 2), _mm512_mask_storeu_epi16(to, mask, values))
#define _mm512_mask_cvtepi32_storeu_epi8(to, mask, values) \
  (seen<__mmask16>(to, mask, 1), _mm512_mask_cvtepi32_storeu_epi8(to, mask, values))
#endif

// 16 rows of AMX, of up to 64 bytes.
inline void see_tile(const void* memory, int64_t stride) {
  for (int64_t row = 0; row < 16; ++row) see_bytes(static_cast<const char*>(memory) + row * stride, stride < 64 ? stride : 64);
}
