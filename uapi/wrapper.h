/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/* bindgen does not evaluate _IO(): a constant of another name carries each command's value, and build.rs drops the prefix. */
#include "ibgda.h"

#define VALUE(name) static const __u32 VALUE_OF_##name = name

VALUE(IBGDA_IOC_INFO);
VALUE(IBGDA_IOC_BIND);
VALUE(IBGDA_IOC_DOORBELL_IMPORT);
VALUE(IBGDA_IOC_QUEUE_ALLOC);
VALUE(IBGDA_IOC_POPULATE);
VALUE(IBGDA_IOC_STATUS);
VALUE(IBGDA_IOC_RELEASE);
VALUE(IBGDA_IOC_EVENTFD);
VALUE(IBGDA_IOC_EVENTS);
VALUE(IBGDA_IOC_REBIND);
