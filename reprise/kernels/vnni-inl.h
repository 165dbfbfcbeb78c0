// Include after highway.h and before HWY_BEFORE_NAMESPACE, in every instruction set's turn. Highway 1.0.3 counts
// AVX512-VNNI among what AVX3_DL needs but does not tell the compiler. Private to `kernels`.
#include <hwy/highway.h>

#if HWY_TARGET == HWY_AVX3_DL && HWY_MAJOR == 1 && HWY_MINOR == 0 && HWY_PATCH <= 3
#undef HWY_TARGET_STR
// Highway's own functions have all the others, so they can be inlined.
#define HWY_TARGET_STR \
  HWY_TARGET_STR_AVX3 ",vpclmulqdq,avx512vbmi,avx512vbmi2,vaes,avxvnni,avx512bitalg,avx512vpopcntdq,avx512vnni"
#endif
