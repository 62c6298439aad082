#ifndef INF_WIRE_H
#define INF_WIRE_H
#include <stdint.h>
#include "comm_codec.cdef.h"
#endif
