#ifndef INF_GRADIENTS_H
#define INF_GRADIENTS_H
#include <stdint.h>
#include "gradients.cdef.h"
#endif
