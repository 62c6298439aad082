#ifndef INF_WIRE_H
#define INF_WIRE_H
#include <stdint.h>
#include "wire.cdef.h"
#endif
