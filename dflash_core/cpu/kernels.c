/* The operations of a bf16 step on a CPU with AVX512-BF16: products, attention, argmax.
 *
 * With few rows a step is bound by how fast weights are read, so a weight is laid out to be read
 * once, in order, and whatever surrounds a product (the norm before it, SwiGLU or the residual
 * after it) is done while its rows are in the cache. All sums are in float32, and every result is
 * summed up in the same order whatever else a call holds: a token's bits do not depend on the rows
 * beside it, on the number of threads, or on how the work is split.
 *
 * Shape legend: R rows, I input size, O output size, B sequences, L block length, N query heads,
 * G key/value heads, D head dimension, C positions of a cache slot, P positions of the rotary
 * tables, V vocabulary.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define COLUMNS 32 /* of a weight block: two registers of float32 sums for each row */
#define ROWS 12    /* of a product at most: 24 registers of sums, two of weights */
#define KEYS 64    /* that attention looks at together */
#define UNIT 48    /* query rows for which a block of keys is prepared once */
#define MAX_HEAD_DIM 256
#define NEVER (-1e30f) /* a maximum before the first key */

/* ---- registers ---- */

INLINE __mmask16 first16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
INLINE __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1; }

INLINE __m512 load(const bf16 *from, __mmask16 mask) {
    __m256i raw = _mm256_maskz_loadu_epi16(mask, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

INLINE void store(bf16 *to, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Two neighbouring values in every lane. */
INLINE __m512bh pair(const bf16 *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* 2^x; relative error below 2e-6, exactly 1 at 0. */
INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole); /* in [-1/2, 1/2]: the series of exp(f ln 2) */
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

INLINE __m512 silu(__m512 x) {
    __m512 e = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}

/* What an RMS norm divides by. */
INLINE __m512 root_mean_square(const bf16 *x, int64_t size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m512 v = load(x + i, first16(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    return _mm512_sqrt_ps(_mm512_set1_ps(_mm512_reduce_add_ps(squares) / (float)size + eps));
}

/* ---- products ---- */

/* A weight [O, I] and how it is laid out: blocks of COLUMNS outputs, in them pairs of inputs. With
 * swiglu a block is 16 columns of the gate and the same 16 of up, and the output has O / 2. */
struct weight {
    const bf16 *blocks; /* [ceil(O / COLUMNS), I / 2, COLUMNS, 2], the rest filled with zeros */
    const float *bias;  /* [ceil(O / COLUMNS) * COLUMNS], in the order of the columns, or NULL */
    int64_t inputs, outputs;
    int64_t swiglu;
};

static void rms_norm(const bf16 *x, const bf16 *weight, float eps, int64_t size, bf16 *y) {
    const __m512 root = root_mean_square(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES) {
        __mmask16 mask = first16(size - i);
        __m512 v = _mm512_div_ps(load(x + i, mask), root);
        store(y + i, _mm512_mul_ps(v, load(weight + i, mask)), mask);
    }
}

INLINE void product(const int rows, const bf16 *x, const struct weight *w, int64_t block,
                    const bf16 *residual, bf16 *y) {
    const int64_t inputs = w->inputs;
    const bf16 *column = w->blocks + block * COLUMNS * inputs;
    __m512 left[ROWS], right[ROWS];
    for (int r = 0; r < rows; r++)
        left[r] = right[r] = _mm512_setzero_ps();
    if (w->bias)
        for (int r = 0; r < rows; r++) {
            left[r] = _mm512_loadu_ps(w->bias + block * COLUMNS);
            right[r] = _mm512_loadu_ps(w->bias + block * COLUMNS + LANES);
        }
    for (int64_t i = 0; i < inputs; i += 2, column += 2 * COLUMNS) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(column);
        __m512bh b = (__m512bh)_mm512_loadu_si512(column + COLUMNS);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512bh both = pair(x + r * inputs + i);
            left[r] = _mm512_dpbf16_ps(left[r], a, both);
            right[r] = _mm512_dpbf16_ps(right[r], b, both);
        }
    }
    if (w->swiglu) {
        const int64_t outputs = w->outputs / 2, at = block * LANES;
        const __mmask16 mask = first16(outputs - at);
        for (int r = 0; r < rows; r++)
            store(y + r * outputs + at, _mm512_mul_ps(silu(left[r]), right[r]), mask);
        return;
    }
    const int64_t outputs = w->outputs, at = block * COLUMNS;
    const __mmask16 first = first16(outputs - at), second = first16(outputs - at - LANES);
    for (int r = 0; r < rows; r++) {
        bf16 *to = y + r * outputs + at;
        if (residual) {
            const bf16 *from = residual + r * outputs + at;
            left[r] = _mm512_add_ps(left[r], load(from, first));
            right[r] = _mm512_add_ps(right[r], load(from + LANES, second));
        }
        store(to, left[r], first);
        store(to + LANES, right[r], second);
    }
}

/* The sums have to be registers, so their number has to be a constant. */
#define FOR_ROWS(rows, call)                                                                       \
    switch (rows) {                                                                                \
    case 1: call(1); break;                                                                        \
    case 2: call(2); break;                                                                        \
    case 3: call(3); break;                                                                        \
    case 4: call(4); break;                                                                        \
    case 5: call(5); break;                                                                        \
    case 6: call(6); break;                                                                        \
    case 7: call(7); break;                                                                        \
    case 8: call(8); break;                                                                        \
    case 9: call(9); break;                                                                        \
    case 10: call(10); break;                                                                      \
    case 11: call(11); break;                                                                      \
    default: call(12);                                                                             \
    }

/* What follows with "team" in its name is called by all threads of a team together: they share the
 * work, and the function has ended for all of them when it has for one. */

/* y = RMS norm of x, both [R, size]. */
static void team_norm(const bf16 *x, const bf16 *weight, float eps, int64_t size, bf16 *y,
                      int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        rms_norm(x + r * size, weight, eps, size, y + r * size);
}

/* y = norm(x) W^T + bias + residual, or SwiGLU of it.
 *
 * x [R, I]; norm: weight of an RMS norm [I], or NULL for none; normed [R, I]: room for norm(x);
 * residual, y [R, O], or y [R, O / 2]; residual may be NULL, and it may be y.
 */
static void team_linear(const struct weight *w, const bf16 *x, const bf16 *norm, float eps,
                        bf16 *normed, const bf16 *residual, bf16 *y, int64_t rows) {
    const int64_t blocks = (w->outputs + COLUMNS - 1) / COLUMNS;
    const int64_t width = w->swiglu ? w->outputs / 2 : w->outputs;
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    const bf16 *input = norm ? normed : x;
    if (norm)
        team_norm(x, norm, eps, w->inputs, normed, rows);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
#define CALL(n)                                                                                    \
    product(n, input + from * w->inputs, w, block, residual ? residual + from * width : NULL,      \
            y + from * width)
            FOR_ROWS(to - from, CALL)
#undef CALL
        }
}

void dflash_linear(const struct weight *w, const bf16 *x, const bf16 *norm, float eps,
                   bf16 *normed, bf16 *y, int64_t rows) {
#pragma omp parallel
    team_linear(w, x, norm, eps, normed, NULL, y, rows);
}

/* ---- attention ---- */

/* What every layer of one forward pass shares. Rows are the B * L tokens. */
struct block {
    const float *cos, *sin; /* [P, D]; the first half of sin with its sign changed */
    const int32_t *positions; /* [R] */
    const int64_t *places;    /* [R] row of the cache that the token's key and value go to */
    const int32_t *slots;     /* [B] */
    const int32_t *first, *end; /* [R] a token sees the keys first <= position < end */
    int64_t sequences, length;
};

struct heads {
    const bf16 *q_norm, *k_norm; /* [D], weights of RMS norms, or NULL for none */
    int64_t queries, groups, dim; /* N, G, D */
    float eps;
};

struct cache {
    bf16 *keys, *values; /* [slots, C, G, D] */
    int64_t positions;   /* C */
};

/* Normalise (if there is a norm) and rotate a head. */
static void rotate(const bf16 *x, const bf16 *norm, float eps, int64_t dim, const float *cos,
                   const float *sin, bf16 *y) {
    const int64_t half = dim / 2;
    const __m512 root = norm ? root_mean_square(x, dim, eps) : _mm512_set1_ps(1.0f);
    for (int64_t d = 0; d < half; d += LANES) {
        const __mmask16 mask = first16(half - d);
        __m512 a = load(x + d, mask), b = load(x + half + d, mask);
        if (norm) {
            a = _mm512_mul_ps(_mm512_div_ps(a, root), load(norm + d, mask));
            b = _mm512_mul_ps(_mm512_div_ps(b, root), load(norm + half + d, mask));
        }
        __m512 ca = _mm512_maskz_loadu_ps(mask, cos + d), sa = _mm512_maskz_loadu_ps(mask, sin + d);
        __m512 cb = _mm512_maskz_loadu_ps(mask, cos + half + d);
        __m512 sb = _mm512_maskz_loadu_ps(mask, sin + half + d);
        store(y + d, _mm512_fmadd_ps(a, ca, _mm512_mul_ps(b, sa)), mask);
        store(y + half + d, _mm512_fmadd_ps(b, cb, _mm512_mul_ps(a, sb)), mask);
    }
}

/* One row of projections, [N + 2 G, D]: queries to q, keys and values to the cache. */
static void place(const struct heads *h, const struct block *t, const struct cache *c, int64_t row,
                  const bf16 *projected, bf16 *q) {
    const int64_t dim = h->dim, size = h->groups * dim;
    const float *cos = t->cos + t->positions[row] * dim, *sin = t->sin + t->positions[row] * dim;
    for (int64_t n = 0; n < h->queries; n++, projected += dim)
        rotate(projected, h->q_norm, h->eps, dim, cos, sin, q + n * dim);
    for (int64_t g = 0; g < h->groups; g++, projected += dim)
        rotate(projected, h->k_norm, h->eps, dim, cos, sin,
               c->keys + t->places[row] * size + g * dim);
    memcpy(c->values + t->places[row] * size, projected, size * sizeof *projected);
}

/* 16 rows of 16 32-bit values: columns become rows. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
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

/* A block of keys and values of one head as the products want them; positions from `count` on are
 * zeros. */
struct prepared {
    uint32_t keys[MAX_HEAD_DIM / 2][KEYS];   /* a pair of dimensions of each key */
    uint32_t values[KEYS / 2][MAX_HEAD_DIM]; /* a dimension of each pair of keys */
};

static void prepare(const bf16 *keys, const bf16 *values, int64_t stride, int64_t dim,
                    int64_t count, struct prepared *p) {
    for (int64_t key = 0; key < count; key += LANES)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            __m512i rows[LANES];
            for (int i = 0; i < LANES; i++) {
                const __mmask32 mask = key + i < count ? first32(dim - d) : 0;
                rows[i] = _mm512_maskz_loadu_epi16(mask, keys + (key + i) * stride + d);
            }
            transpose(rows);
            for (int i = 0; i < LANES; i++)
                _mm512_storeu_si512(&p->keys[d / 2 + i][key], rows[i]);
        }
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                          8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    for (int64_t key = 0; key < count; key += 2)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            const __mmask32 mask = first32(dim - d);
            __m512i a = _mm512_maskz_loadu_epi16(mask, values + key * stride + d);
            __m512i b = _mm512_maskz_loadu_epi16(key + 1 < count ? mask : 0,
                                                 values + (key + 1) * stride + d);
            _mm512_storeu_si512(&p->values[key / 2][d], _mm512_permutex2var_epi16(a, even, b));
            _mm512_storeu_si512(&p->values[key / 2][d + LANES],
                                _mm512_permutex2var_epi16(a, odd, b));
        }
}

/* Query rows of one head group and what has been summed up for them. */
struct rows {
    bf16 q[UNIT][MAX_HEAD_DIM];
    float sum[UNIT][MAX_HEAD_DIM]; /* of values */
    float max[UNIT], weight[UNIT]; /* largest score, in powers of 2, and sum of 2^(score - max) */
    int32_t first[UNIT], end[UNIT];
};

INLINE void scores_of(const int rows, const bf16 (*q)[MAX_HEAD_DIM], const struct prepared *p,
                      int64_t dim, int64_t count, float (*scores)[KEYS]) {
    for (int64_t key = 0; key < count; key += LANES) {
        __m512 sum[ROWS];
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 2) {
            __m512bh keys = (__m512bh)_mm512_loadu_si512(&p->keys[d / 2][key]);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                sum[r] = _mm512_dpbf16_ps(sum[r], keys, pair(&q[r][d]));
        }
        for (int r = 0; r < rows; r++)
            _mm512_storeu_ps(&scores[r][key], sum[r]);
    }
}

INLINE void add_values(const int rows, const bf16 (*weights)[KEYS], const struct prepared *p,
                       int64_t dim, int64_t count, float (*sums)[MAX_HEAD_DIM]) {
    for (int64_t d = 0; d < dim; d += LANES) {
        __m512 sum[ROWS];
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_loadu_ps(&sums[r][d]);
        for (int64_t key = 0; key < count; key += 2) {
            __m512bh values = (__m512bh)_mm512_loadu_si512(&p->values[key / 2][d]);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                sum[r] = _mm512_dpbf16_ps(sum[r], values, pair(&weights[r][key]));
        }
        for (int r = 0; r < rows; r++)
            _mm512_storeu_ps(&sums[r][d], sum[r]);
    }
}

/* Scores of one row to weights; what was summed up so far is scaled to the new maximum. */
static void weigh(struct rows *u, int64_t row, int64_t start, int64_t count, int64_t dim,
                  float scale, const float *scores, bf16 *weights) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i first = _mm512_set1_epi32(u->first[row]), end = _mm512_set1_epi32(u->end[row]);
    __m512 score[KEYS / LANES], largest = _mm512_set1_ps(NEVER);
    __mmask16 seen[KEYS / LANES];
    for (int i = 0; i < KEYS / LANES; i++) {
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(start + i * LANES));
        seen[i] = _mm512_cmpge_epi32_mask(at, first) & _mm512_cmplt_epi32_mask(at, end) &
                  first16(count - i * LANES);
        score[i] = _mm512_mul_ps(_mm512_maskz_loadu_ps(seen[i], scores + i * LANES),
                                 _mm512_set1_ps(scale));
        largest = _mm512_mask_max_ps(largest, seen[i], largest, score[i]);
    }
    const float before = u->max[row], now = _mm512_reduce_max_ps(largest);
    const float max = now > before ? now : before;
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < KEYS / LANES; i++) {
        __m512 weight = exp2_of(_mm512_sub_ps(score[i], _mm512_set1_ps(max)));
        weight = _mm512_maskz_mov_ps(seen[i], weight);
        total = _mm512_add_ps(total, weight);
        store(weights + i * LANES, weight, 0xffff);
    }
    u->max[row] = max;
    if (max > before) {
        const __m512 less = exp2_of(_mm512_set1_ps(before - max));
        u->weight[row] *= _mm512_cvtss_f32(less);
        for (int64_t d = 0; d < dim; d += LANES)
            _mm512_storeu_ps(&u->sum[row][d], _mm512_mul_ps(_mm512_loadu_ps(&u->sum[row][d]), less));
    }
    u->weight[row] += _mm512_reduce_add_ps(total);
}

/* Attention of the query rows [from, to) of head group g of sequence b. Rows are token by token,
 * in a token the heads of the group. Keys come in blocks that begin at multiples of KEYS, so a
 * row's sums do not depend on the rows beside it: a block of which it sees nothing adds zero. */
static void attend(const struct heads *h, const struct block *t, const struct cache *c, int64_t b,
                   int64_t g, int64_t from, int64_t to, const bf16 *q, bf16 *out) {
    const int64_t dim = h->dim, each = h->queries / h->groups, stride = h->groups * dim;
    const float scale = 1.44269504f * _mm_cvtss_f32(_mm_div_ss(
        _mm_set_ss(1.0f), _mm_sqrt_ss(_mm_set_ss((float)dim))));
    const bf16 *keys = c->keys + t->slots[b] * c->positions * stride + g * dim;
    const bf16 *values = c->values + t->slots[b] * c->positions * stride + g * dim;
    struct rows u;
    struct prepared p;
    float scores[ROWS][KEYS];
    bf16 weights[ROWS][KEYS];
    int64_t first = c->positions, end = 0;
    for (int64_t row = from; row < to; row++) {
        const int64_t token = b * t->length + row / each, i = row - from;
        memcpy(u.q[i], q + (token * h->queries + g * each + row % each) * dim, dim * sizeof *q);
        memset(u.sum[i], 0, sizeof u.sum[i]);
        u.max[i] = NEVER;
        u.weight[i] = 0;
        u.first[i] = t->first ? t->first[token] : 0;
        u.end[i] = t->end[token];
        first = u.first[i] < first ? u.first[i] : first;
        end = u.end[i] > end ? u.end[i] : end;
    }
    for (int64_t start = first / KEYS * KEYS; start < end; start += KEYS) {
        const int64_t count = end - start < KEYS ? end - start : KEYS;
        prepare(keys + start * stride, values + start * stride, stride, dim, count, &p);
        for (int64_t i = 0; i < to - from; i += ROWS) {
            const int64_t n = to - from - i < ROWS ? to - from - i : ROWS;
#define CALL(n) scores_of(n, u.q + i, &p, dim, count, scores)
            FOR_ROWS(n, CALL)
#undef CALL
            for (int64_t r = 0; r < n; r++)
                weigh(&u, i + r, start, count, dim, scale, scores[r], weights[r]);
#define CALL(n) add_values(n, weights, &p, dim, count, u.sum + i)
            FOR_ROWS(n, CALL)
#undef CALL
        }
    }
    for (int64_t row = from; row < to; row++) {
        const int64_t token = b * t->length + row / each, i = row - from;
        bf16 *y = out + (token * h->queries + g * each + row % each) * dim;
        const __m512 weight = _mm512_set1_ps(u.weight[i]);
        for (int64_t d = 0; d < dim; d += LANES)
            store(y + d, _mm512_div_ps(_mm512_loadu_ps(&u.sum[i][d]), weight), first16(dim - d));
    }
}

/* Keys and values to the cache, then attention: projected [B, L, N + 2 G, D]; q: room for
 * [B, L, N, D]; out [B, L, N, D]. */
static void team_attention(const struct heads *h, const struct block *t, const struct cache *c,
                           const bf16 *projected, bf16 *q, bf16 *out) {
    const int64_t tokens = t->sequences * t->length, rows = t->length * (h->queries / h->groups);
    const int64_t size = rows > 2 * UNIT ? UNIT : ROWS, units = (rows + size - 1) / size;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < tokens; r++)
        place(h, t, c, r, projected + r * (h->queries + 2 * h->groups) * h->dim,
              q + r * h->queries * h->dim);
#pragma omp for schedule(dynamic) collapse(3)
    for (int64_t b = 0; b < t->sequences; b++)
        for (int64_t g = 0; g < h->groups; g++)
            for (int64_t unit = 0; unit < units; unit++) {
                const int64_t from = unit * size, to = from + size < rows ? from + size : rows;
                attend(h, t, c, b, g, from, to, q, out);
            }
}

/* ---- decoder layers ---- */

struct layer {
    const bf16 *attention_norm, *mlp_norm; /* [H] */
    struct weight qkv, output, gate_up, down;
    struct heads heads;
    float eps;
    int64_t block; /* which of the blocks says where its tokens are */
    int64_t tap;   /* which of the features its output is, or -1 */
};

struct room {
    bf16 *normed;    /* [R, H] */
    bf16 *projected; /* [R, N + 2 G, D] */
    bf16 *queries, *attended; /* [R, N, D] */
    bf16 *gated;     /* [R, intermediate size] */
};

/* Run x [R, H] through the layers, in place; features [R, taps, H]. */
void dflash_decode(const struct layer *layers, int64_t count, const struct block *blocks,
                   const struct cache *caches, const struct room *room, bf16 *x, bf16 *features,
                   int64_t taps) {
    const int64_t rows = blocks->sequences * blocks->length, size = layers->qkv.inputs;
#pragma omp parallel
    for (int64_t i = 0; i < count; i++) {
        const struct layer *l = layers + i;
        team_linear(&l->qkv, x, l->attention_norm, l->eps, room->normed, NULL, room->projected,
                    rows);
        team_attention(&l->heads, blocks + l->block, caches + i, room->projected, room->queries,
                       room->attended);
        team_linear(&l->output, room->attended, NULL, 0, NULL, x, x, rows);
        team_linear(&l->gate_up, x, l->mlp_norm, l->eps, room->normed, NULL, room->gated, rows);
        team_linear(&l->down, room->gated, NULL, 0, NULL, x, x, rows);
        if (l->tap >= 0) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                memcpy(features + (r * taps + l->tap) * size, x + r * size, size * sizeof *x);
        }
    }
}

/* ---- KV injection ---- */

/* Features [R, F] of context tokens to hidden states (fc), normalised, and those to the keys and
 * values of every layer. context, normed: room for [R, H]; projected: for [R, 2 G, D]. */
void dflash_inject(const struct weight *fc, const bf16 *norm, float eps,
                   const struct weight *projections, const struct heads *heads, int64_t layers,
                   const struct block *t, const struct cache *caches, const bf16 *features,
                   bf16 *context, bf16 *normed, bf16 *projected) {
    const int64_t rows = t->sequences * t->length;
#pragma omp parallel
    {
        team_linear(fc, features, NULL, 0, NULL, NULL, context, rows);
        team_norm(context, norm, eps, fc->outputs, normed, rows);
        for (int64_t i = 0; i < layers; i++) {
            struct heads h = heads[i];
            h.queries = 0;
            team_linear(projections + i, normed, NULL, 0, NULL, NULL, projected, rows);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                place(&h, t, caches + i, r, projected + r * projections[i].outputs, NULL);
        }
    }
}

/* ---- argmax ---- */

/* Of each row of x [R, V], the lowest index of its largest value. */
void dflash_argmax(const bf16 *x, int64_t rows, int64_t size, int32_t *out) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = x + r * size;
        const __m512i step = _mm512_set1_epi32(LANES);
        __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512 best = _mm512_set1_ps(-__builtin_inff());
        __m512i index = at;
        for (int64_t v = 0; v < size; v += LANES) {
            const __mmask16 mask = first16(size - v);
            __m512 value = load(row + v, mask);
            const __mmask16 more = _mm512_mask_cmp_ps_mask(mask, value, best, _CMP_GT_OQ);
            best = _mm512_mask_mov_ps(best, more, value);
            index = _mm512_mask_mov_epi32(index, more, at);
            at = _mm512_add_epi32(at, step);
        }
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(best));
        const __mmask16 equal = _mm512_cmp_ps_mask(best, largest, _CMP_EQ_OQ);
        out[r] = _mm512_mask_reduce_min_epi32(equal, index);
    }
}
