/* Registers of 8 float32 values; bfloat16 is the upper half of a float32: AVX2 and FMA. What each
 * function does is said in kernels.c. */
#define LANES 8
#define ROWS 5  /* 10 registers of sums, two of weights, and some for inputs */
#define STEPS 2 /* the first values of pairs, then the second */

typedef __m256 floats;
typedef __m256i pairs;
typedef __m256 factors;
typedef float input;
typedef __m256 mask;

INLINE mask lanes_in(int64_t first, int64_t end) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)first), lane);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)end), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(before, below));
}

INLINE int first_of(mask m) {
    const int bits = _mm256_movemask_ps(m);
    return bits ? __builtin_ctz(bits) : LANES;
}

INLINE mask equal(floats a, floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE floats choose(mask m, floats a, floats b) { return _mm256_blendv_ps(b, a, m); }

INLINE floats all(float x) { return _mm256_set1_ps(x); }
INLINE floats root(floats x) { return _mm256_sqrt_ps(x); }
INLINE floats larger(floats a, floats b) { return _mm256_max_ps(a, b); }
INLINE floats multiply_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }

INLINE float sum_of(floats x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float largest_of(floats x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE floats nearest_whole(floats x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* In two factors: one has no room for the exponents of infinity and of the smallest numbers. */
INLINE floats times_power_of_2(floats x, floats whole) {
    const __m256i n = _mm256_cvtps_epi32(_mm256_min_ps(whole, all(254.0f)));
    const __m256i half = _mm256_srai_epi32(n, 1), one = _mm256_set1_epi32(127);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, one), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), one), 23);
    return x * _mm256_castsi256_ps(a) * _mm256_castsi256_ps(b);
}

INLINE floats load_whole(const bf16 *from) {
    const __m128i raw = _mm_loadu_si128((const __m128i *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

/* To the nearest bf16, of two to the even one; what is not a number stays so. */
INLINE __m256i rounded(floats x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i y = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
}

INLINE void store_whole(bf16 *to, floats x) {
    const __m256i y = _mm256_srli_epi32(rounded(x), 16);
    const __m128i low = _mm256_castsi256_si128(y), high = _mm256_extracti128_si256(y, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(low, high));
}

INLINE __m256i upper_half(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff0000)); }

INLINE void store_whole_input(input *to, floats x) {
    _mm256_storeu_si256((__m256i *)to, upper_half(rounded(x)));
}

INLINE factors weights_at(const bf16 *from, int step) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)from);
    return _mm256_castsi256_ps(step ? upper_half(both) : _mm256_slli_epi32(both, 16));
}

INLINE factors input_at(const input *from, int step) { return _mm256_set1_ps(from[step]); }

INLINE floats add_product(floats sum, factors a, factors b) { return _mm256_fmadd_ps(a, b, sum); }

INLINE void transpose(pairs r[LANES]) {
    pairs t[LANES];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

INLINE void zip(pairs a, pairs b, pairs *low, pairs *high) {
    const pairs even = _mm256_unpacklo_epi16(a, b), odd = _mm256_unpackhi_epi16(a, b);
    *low = _mm256_permute2x128_si256(even, odd, 0x20);
    *high = _mm256_permute2x128_si256(even, odd, 0x31);
}
