/* Registers of 16 float32 values, and products of pairs: AVX512-BF16. What each function does is
 * said in kernels.c. */
#define LANES 16
#define ROWS 12 /* 24 registers of sums, two of weights, one of inputs */
#define STEPS 1 /* both values of a pair are multiplied and added at once */

typedef __m512 floats;
typedef __m512i pairs;
typedef __m512bh factors;
typedef bf16 input;
typedef __mmask16 mask;

INLINE mask lanes_in(int64_t first, int64_t end) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32((int32_t)first)) &
           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32((int32_t)end));
}

INLINE int first_of(mask m) { return m ? __builtin_ctz(m) : LANES; }
INLINE mask equal(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE floats choose(mask m, floats a, floats b) { return _mm512_mask_mov_ps(b, m, a); }

INLINE floats all(float x) { return _mm512_set1_ps(x); }
INLINE floats root(floats x) { return _mm512_sqrt_ps(x); }
INLINE floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float sum_of(floats x) { return _mm512_reduce_add_ps(x); }
INLINE float largest_of(floats x) { return _mm512_reduce_max_ps(x); }

INLINE floats nearest_whole(floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE floats times_power_of_2(floats x, floats whole) { return _mm512_scalef_ps(x, whole); }

INLINE floats load_whole(const bf16 *from) {
    const __m256i raw = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

INLINE void store_whole(bf16 *to, floats x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
}

INLINE void store_whole_input(input *to, floats x) { store_whole(to, x); }

INLINE factors weights_at(const bf16 *from, int step) {
    (void)step;
    return (factors)_mm512_loadu_si512(from);
}

INLINE factors input_at(const input *from, int step) {
    (void)step;
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (factors)_mm512_set1_epi32(both);
}

INLINE floats add_product(floats sum, factors a, factors b) {
    return _mm512_dpbf16_ps(sum, a, b);
}

INLINE void transpose(pairs r[LANES]) {
    pairs t[LANES];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

INLINE void zip(pairs a, pairs b, pairs *low, pairs *high) {
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                          8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    *low = _mm512_permutex2var_epi16(a, even, b);
    *high = _mm512_permutex2var_epi16(a, odd, b);
}
