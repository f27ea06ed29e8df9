/* The operations of a bf16 step on a CPU: products, attention, argmax.
 *
 * With few rows a step is bound by how fast weights are read, so a weight is laid out to be read
 * once, in order, and whatever surrounds a product (the norm before it, SwiGLU or the residual
 * after it) is done while its rows are in the cache. All sums are in float32, and every result is
 * summed up in the same order whatever else a call holds: a token's bits do not depend on the rows
 * beside it, on the number of threads, or on how the work is split. (They do on the instructions:
 * those of AVX512-BF16 take less care of the smallest numbers.)
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

/* What there is of each set of instructions:
 *
 * LANES, ROWS: float32 values of a register; rows of a product at most.
 * floats, mask: LANES values, and a choice of lanes. Operators work on floats lane by lane.
 * pairs: LANES pairs of bf16.
 * input: how a bf16 is kept that many columns are multiplied with.
 * factors: what add_product multiplies and adds in one of the STEPS that it takes for pairs.
 *
 * lanes_in(first, end): the lanes first <= lane < end
 * first_of(m): the lowest of them, or LANES
 * choose(m, a, b): a where chosen, else b
 * times_power_of_2(x, whole): x * 2^whole, for -150 <= whole
 * load_whole, store_whole, store_whole_input: LANES bf16, rounded to nearest even
 * weights_at(from, step), input_at(from, step): of LANES pairs; of one pair, in every lane
 * transpose: LANES rows of LANES pairs; columns become rows
 * zip(a, b, low, high): the values of a (first of the pair) and of b, paired
 */
#ifdef __AVX512BF16__
#include "avx512.h"
#else
#include "avx2.h"
#endif

#define COLUMNS (2 * LANES) /* of a weight block: two registers of float32 sums for each row */
#define KEYS 64             /* that attention looks at together */
#define UNIT 48             /* query rows for which a block of keys is prepared once */
#define SMALL_UNIT 12       /* the same if there are few rows, so that every thread has some */
#define MAX_HEAD_DIM 256
#define CACHE_LINE 32  /* bf16 values of a line of the processor's cache */
#define NEVER (-1e30f) /* a maximum before the first key */

/* How the Python side lays out weights. */
const int64_t dflash_lanes = LANES;

/* ---- registers ---- */

/* The first n of LANES values, the rest zeros. */
INLINE floats load(const bf16 *from, int64_t n) {
    bf16 some[LANES] = {0};
    if (n >= LANES)
        return load_whole(from);
    if (n > 0)
        memcpy(some, from, n * sizeof *from);
    return load_whole(some);
}

INLINE floats load_floats(const float *from, int64_t n) {
    floats x = all(0);
    if (n >= LANES)
        memcpy(&x, from, sizeof x);
    else if (n > 0)
        memcpy(&x, from, n * sizeof *from);
    return x;
}

/* n of 2 * LANES values. */
INLINE pairs load_pairs(const bf16 *from, int64_t n) {
    pairs x = {0};
    if (n >= 2 * LANES)
        memcpy(&x, from, sizeof x);
    else if (n > 0)
        memcpy(&x, from, n * sizeof *from);
    return x;
}

INLINE void store(bf16 *to, floats x, int64_t n) {
    bf16 some[LANES];
    if (n >= LANES) {
        store_whole(to, x);
    } else if (n > 0) {
        store_whole(some, x);
        memcpy(to, some, n * sizeof *to);
    }
}

INLINE void store_input(input *to, floats x, int64_t n) {
    input some[LANES];
    if (n >= LANES) {
        store_whole_input(to, x);
    } else if (n > 0) {
        store_whole_input(some, x);
        memcpy(to, some, n * sizeof *to);
    }
}

INLINE void store_floats(float *to, floats x) { memcpy(to, &x, sizeof x); }
INLINE void store_pairs(uint32_t *to, pairs x) { memcpy(to, &x, sizeof x); }

/* Loops over rows are unrolled, or their sums would be in memory instead of in registers. */
#define EACH_ROW _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)

/* The sum of products of rows [rows, 2 * pairs] with COLUMNS columns, added to what is there;
 * meanwhile what is `fetch` values further on than the columns is brought to the cache, if not 0. */
INLINE void add_products(const int rows, const input *x, int64_t x_stride, const bf16 *column,
                         int64_t column_stride, int64_t pairs, int64_t fetch,
                         floats left[ROWS], floats right[ROWS]) {
    for (int64_t i = 0; i < pairs; i++, column += column_stride) {
        for (int line = 0; fetch && line < 2 * COLUMNS; line += CACHE_LINE)
            __builtin_prefetch(column + fetch + line);
        for (int step = 0; step < STEPS; step++) {
            const factors a = weights_at(column, step), b = weights_at(column + 2 * LANES, step);
            EACH_ROW {
                const factors both = input_at(x + r * x_stride + 2 * i, step);
                left[r] = add_product(left[r], a, both);
                right[r] = add_product(right[r], b, both);
            }
        }
    }
}

/* 2^x; relative error below 2e-6, exactly 1 at 0. */
INLINE floats exp2_of(floats x) {
    x = larger(x, all(-150.0f));
    const floats whole = nearest_whole(x);
    const floats f = x - whole; /* in [-1/2, 1/2]: the series of exp(f ln 2) */
    floats y = all(1.5403530e-4f);
    y = multiply_add(y, f, all(1.3333558e-3f));
    y = multiply_add(y, f, all(9.6181291e-3f));
    y = multiply_add(y, f, all(5.5504109e-2f));
    y = multiply_add(y, f, all(2.4022651e-1f));
    y = multiply_add(y, f, all(6.9314718e-1f));
    y = multiply_add(y, f, all(1.0f));
    return times_power_of_2(y, whole);
}

INLINE floats silu(floats x) { return x / (exp2_of(x * all(-1.44269504f)) + all(1.0f)); }

/* What an RMS norm divides by. */
INLINE floats root_mean_square(const bf16 *x, int64_t size, float eps) {
    floats squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const floats v = load(x + i, size - i);
        squares = multiply_add(v, v, squares);
    }
    return root(all(sum_of(squares) / (float)size + eps));
}

/* ---- products ---- */

/* A weight [O, I] and how it is laid out: blocks of COLUMNS outputs, in them pairs of inputs. With
 * swiglu a block is LANES columns of the gate and the same of up, and the output has O / 2. */
struct weight {
    const bf16 *blocks; /* [ceil(O / COLUMNS), I / 2, COLUMNS, 2], the rest filled with zeros */
    const float *bias;  /* [ceil(O / COLUMNS) * COLUMNS], in the order of the columns, or NULL */
    int64_t inputs, outputs;
    int64_t swiglu;
};

static void rms_norm(const bf16 *x, const bf16 *weight, float eps, int64_t size, input *y) {
    const floats divisor = root_mean_square(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES)
        store_input(y + i, load(x + i, size - i) / divisor * load(weight + i, size - i), size - i);
}

INLINE void product(const int rows, const input *x, const struct weight *w, int64_t block,
                    int64_t fetch, const bf16 *residual, bf16 *y) {
    const float *bias = w->bias ? w->bias + block * COLUMNS : NULL;
    floats left[ROWS], right[ROWS];
    EACH_ROW {
        left[r] = bias ? load_floats(bias, LANES) : all(0);
        right[r] = bias ? load_floats(bias + LANES, LANES) : all(0);
    }
    add_products(rows, x, w->inputs, w->blocks + block * COLUMNS * w->inputs, 2 * COLUMNS,
                 w->inputs / 2, fetch, left, right);
    if (w->swiglu) {
        const int64_t outputs = w->outputs / 2, at = block * LANES;
        EACH_ROW store(y + r * outputs + at, silu(left[r]) * right[r], outputs - at);
        return;
    }
    const int64_t outputs = w->outputs, at = block * COLUMNS;
    const int64_t first = outputs - at, second = first - LANES;
    EACH_ROW {
        bf16 *to = y + r * outputs + at;
        if (residual) {
            const bf16 *from = residual + r * outputs + at;
            left[r] = left[r] + load(from, first);
            right[r] = right[r] + load(from + LANES, second);
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
    MORE_ROWS(call)                                                                                \
    default: call(ROWS);                                                                           \
    }
#if ROWS == 12
#define MORE_ROWS(call)                                                                            \
    case 5: call(5); break;                                                                        \
    case 6: call(6); break;                                                                        \
    case 7: call(7); break;                                                                        \
    case 8: call(8); break;                                                                        \
    case 9: call(9); break;                                                                        \
    case 10: call(10); break;                                                                      \
    case 11: call(11); break;
#else
#define MORE_ROWS(call)
#endif

/* What follows with "team" in its name is called by all threads of a team together: they share the
 * work, and the function has ended for all of them when it has for one. */

/* y = x, or its RMS norm if there is a weight for one, [R, size]. */
static void team_inputs(const bf16 *x, const bf16 *norm, float eps, int64_t size, input *y,
                        int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        if (norm)
            rms_norm(x + r * size, norm, eps, size, y + r * size);
        else
            for (int64_t i = 0; i < size; i += LANES)
                store_input(y + r * size + i, load(x + r * size + i, size - i), size - i);
    }
}

/* y = x W^T + bias + residual, or SwiGLU of it.
 *
 * x [R, I]; residual, y [R, O], or y [R, O / 2]; residual may be NULL, and it may be y.
 */
static void team_products(const struct weight *w, const input *x, const bf16 *residual, bf16 *y,
                          int64_t rows) {
    const int64_t blocks = (w->outputs + COLUMNS - 1) / COLUMNS;
    const int64_t width = w->swiglu ? w->outputs / 2 : w->outputs;
    const int64_t parts = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
            /* Only the first part waits for memory; the last can do so for the next block. */
            const int64_t fetch = part > 0 && part == parts - 1 ? COLUMNS * w->inputs : 0;
#define CALL(n)                                                                                    \
    product(n, x + from * w->inputs, w, block, fetch, residual ? residual + from * width : NULL,          \
            y + from * width)
            FOR_ROWS(to - from, CALL)
#undef CALL
        }
}

/* The same of x [R, I] as it is, or of its RMS norm; inputs: room for [R, I]. */
static void team_linear(const struct weight *w, const bf16 *x, const bf16 *norm, float eps,
                        input *inputs, const bf16 *residual, bf16 *y, int64_t rows) {
    team_inputs(x, norm, eps, w->inputs, inputs, rows);
    team_products(w, inputs, residual, y, rows);
}

void dflash_linear(const struct weight *w, const bf16 *x, const bf16 *norm, float eps,
                   input *inputs, bf16 *y, int64_t rows) {
#pragma omp parallel
    team_linear(w, x, norm, eps, inputs, NULL, y, rows);
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
    const floats divisor = norm ? root_mean_square(x, dim, eps) : all(1);
    for (int64_t d = 0; d < half; d += LANES) {
        const int64_t n = half - d;
        floats a = load(x + d, n), b = load(x + half + d, n);
        if (norm) {
            a = a / divisor * load(norm + d, n);
            b = b / divisor * load(norm + half + d, n);
        }
        const floats ca = load_floats(cos + d, n), cb = load_floats(cos + half + d, n);
        const floats sa = load_floats(sin + d, n), sb = load_floats(sin + half + d, n);
        store(y + d, multiply_add(a, ca, b * sa), n);
        store(y + half + d, multiply_add(b, cb, a * sb), n);
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

/* A block of keys and values of one head as the products want them; positions from `count` on are
 * zeros. Heads are filled up to a whole number of columns. */
struct prepared {
    uint32_t keys[MAX_HEAD_DIM / 2 * KEYS];   /* [D / 2, KEYS] a pair of dimensions of each key */
    uint32_t values[KEYS / 2 * MAX_HEAD_DIM]; /* [KEYS / 2, D] a dimension of each pair of keys */
};

INLINE int64_t filled_up(int64_t dim) { return (dim + COLUMNS - 1) / COLUMNS * COLUMNS; }

static void prepare(const bf16 *keys, const bf16 *values, int64_t stride, int64_t dim,
                    int64_t count, struct prepared *p) {
    const int64_t width = filled_up(dim);
    for (int64_t key = 0; key < count; key += LANES)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            const bf16 *from = keys + key * stride + d;
            pairs rows[LANES];
            if (key + LANES <= count && d + 2 * LANES <= dim)
                for (int i = 0; i < LANES; i++)
                    rows[i] = load_pairs(from + i * stride, 2 * LANES);
            else
                for (int i = 0; i < LANES; i++)
                    rows[i] = load_pairs(from + i * stride, key + i < count ? dim - d : 0);
            transpose(rows);
            for (int i = 0; i < LANES; i++)
                store_pairs(p->keys + (d / 2 + i) * KEYS + key, rows[i]);
        }
    for (int64_t key = 0; key < count; key += 2)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            const bf16 *from = values + key * stride + d;
            uint32_t *to = p->values + key / 2 * width + d;
            pairs low, high;
            zip(load_pairs(from, dim - d), load_pairs(from + stride, key + 1 < count ? dim - d : 0),
                &low, &high);
            store_pairs(to, low);
            store_pairs(to + LANES, high);
        }
}

/* Query rows of one head group and what has been summed up for them. */
struct rows {
    input q[UNIT * MAX_HEAD_DIM];   /* [rows, D] */
    float sum[UNIT * MAX_HEAD_DIM]; /* [rows, D], of values */
    float max[UNIT], weight[UNIT]; /* largest score, in powers of 2, and sum of 2^(score - max) */
    int32_t first[UNIT], end[UNIT];
};

INLINE void scores_of(const int rows, const input *q, const struct prepared *p,
                      int64_t dim, int64_t count, float (*scores)[KEYS]) {
    for (int64_t key = 0; key < count; key += COLUMNS) {
        floats left[ROWS], right[ROWS];
        EACH_ROW left[r] = right[r] = all(0);
        add_products(rows, q, filled_up(dim), (const bf16 *)(p->keys + key), 2 * KEYS, dim / 2, 0,
                     left, right);
        EACH_ROW {
            store_floats(&scores[r][key], left[r]);
            store_floats(&scores[r][key + LANES], right[r]);
        }
    }
}

INLINE void add_values(const int rows, const input (*weights)[KEYS], const struct prepared *p,
                       int64_t dim, int64_t count, float *sums) {
    const int64_t width = filled_up(dim);
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        floats left[ROWS], right[ROWS];
        EACH_ROW {
            left[r] = load_floats(sums + r * width + d, LANES);
            right[r] = load_floats(sums + r * width + d + LANES, LANES);
        }
        add_products(rows, weights[0], KEYS, (const bf16 *)(p->values + d), 2 * width,
                     (count + 1) / 2, 0, left, right);
        EACH_ROW {
            store_floats(sums + r * width + d, left[r]);
            store_floats(sums + r * width + d + LANES, right[r]);
        }
    }
}

/* Scores of one row to weights; what was summed up so far is scaled to the new maximum. */
static void weigh(struct rows *u, int64_t row, int64_t start, int64_t count, int64_t dim,
                  float scale, const float *scores, input *weights) {
    const int64_t first = u->first[row] - start, last = u->end[row] - start;
    const int64_t end = last < count ? last : count;
    floats score[KEYS / LANES], largest = all(NEVER), total = all(0);
    mask seen[KEYS / LANES];
    for (int i = 0; i < KEYS / LANES; i++) {
        seen[i] = lanes_in(first - i * LANES, end - i * LANES);
        score[i] = choose(seen[i], load_floats(scores + i * LANES, LANES) * all(scale), all(NEVER));
        largest = larger(largest, score[i]);
    }
    const float before = u->max[row], now = largest_of(largest);
    const float max = now > before ? now : before;
    for (int i = 0; i < KEYS / LANES; i++) {
        const floats weight = choose(seen[i], exp2_of(score[i] - all(max)), all(0));
        total = total + weight;
        store_input(weights + i * LANES, weight, LANES);
    }
    u->max[row] = max;
    if (max > before) {
        const floats less = exp2_of(all(before - max));
        float factor[LANES];
        store_floats(factor, less);
        u->weight[row] *= factor[0];
        float *sum = u->sum + row * filled_up(dim);
        for (int64_t d = 0; d < dim; d += LANES)
            store_floats(sum + d, load_floats(sum + d, LANES) * less);
    }
    u->weight[row] += sum_of(total);
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
    input weights[ROWS][KEYS];
    const int64_t width = filled_up(dim), rows = to - from, parts = (rows + ROWS - 1) / ROWS;
    int64_t first = c->positions, end = 0;
    for (int64_t row = from; row < to; row++) {
        const int64_t token = b * t->length + row / each, i = row - from;
        const bf16 *query = q + (token * h->queries + g * each + row % each) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store_input(u.q + i * width + d, load(query + d, dim - d), dim - d);
        memset(u.sum + i * width, 0, width * sizeof *u.sum);
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
        for (int64_t part = 0; part < parts; part++) {
            const int64_t i = rows * part / parts, n = rows * (part + 1) / parts - i;
#define CALL(n) scores_of(n, u.q + i * width, &p, dim, count, scores)
            FOR_ROWS(n, CALL)
#undef CALL
            for (int64_t r = 0; r < n; r++)
                weigh(&u, i + r, start, count, dim, scale, scores[r], weights[r]);
#define CALL(n) add_values(n, weights, &p, dim, count, u.sum + i * width)
            FOR_ROWS(n, CALL)
#undef CALL
        }
    }
    for (int64_t row = from; row < to; row++) {
        const int64_t token = b * t->length + row / each, i = row - from;
        bf16 *y = out + (token * h->queries + g * each + row % each) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store(y + d, load_floats(u.sum + i * width + d, LANES) / all(u.weight[i]), dim - d);
    }
}

/* Keys and values to the cache, then attention: projected [B, L, N + 2 G, D]; q: room for
 * [B, L, N, D]; out [B, L, N, D]. */
static void team_attention(const struct heads *h, const struct block *t, const struct cache *c,
                           const bf16 *projected, bf16 *q, bf16 *out) {
    const int64_t tokens = t->sequences * t->length, rows = t->length * (h->queries / h->groups);
    const int64_t size = rows > 2 * UNIT ? UNIT : SMALL_UNIT, units = (rows + size - 1) / size;
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
    input *inputs;   /* [R, the largest input size] */
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
        team_linear(&l->qkv, x, l->attention_norm, l->eps, room->inputs, NULL, room->projected,
                    rows);
        team_attention(&l->heads, blocks + l->block, caches + i, room->projected, room->queries,
                       room->attended);
        team_linear(&l->output, room->attended, NULL, 0, room->inputs, x, x, rows);
        team_linear(&l->gate_up, x, l->mlp_norm, l->eps, room->inputs, NULL, room->gated, rows);
        team_linear(&l->down, room->gated, NULL, 0, room->inputs, x, x, rows);
        if (l->tap >= 0) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                memcpy(features + (r * taps + l->tap) * size, x + r * size, size * sizeof *x);
        }
    }
}

/* ---- KV injection ---- */

/* Features [R, F] of context tokens to hidden states (fc), normalised, and those to the keys and
 * values of every layer. inputs: room for [R, F] and [R, H]; context: for [R, H]; projected: for
 * [R, 2 G, D]. */
void dflash_inject(const struct weight *fc, const bf16 *norm, float eps,
                   const struct weight *projections, const struct heads *heads, int64_t layers,
                   const struct block *t, const struct cache *caches, const bf16 *features,
                   input *inputs, bf16 *context, bf16 *projected) {
    const int64_t rows = t->sequences * t->length;
#pragma omp parallel
    {
        team_linear(fc, features, NULL, 0, inputs, NULL, context, rows);
        team_inputs(context, norm, eps, fc->outputs, inputs, rows);
        for (int64_t i = 0; i < layers; i++) {
            struct heads h = heads[i];
            h.queries = 0;
            team_products(projections + i, inputs, NULL, projected, rows);
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
        const floats none = all(-__builtin_inff());
        floats best = none;
        for (int64_t v = 0; v < size; v += LANES)
            best = larger(choose(lanes_in(0, size - v), load(row + v, size - v), none), best);
        best = all(largest_of(best));
        out[r] = 0;
        for (int64_t v = 0; v < size; v += LANES) {
            const int lane = first_of(equal(load(row + v, size - v), best));
            if (lane < LANES) {
                out[r] = v + lane;
                break;
            }
        }
    }
}
