/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The C view of libibgda, made by cbindgen from libibgda/src/capi*: do not edit. Every function returns 0 or an errno;
 * then ibgda_last_error() has the sentence. Objects may be destroyed in any order. EBADF: one that was destroyed, is of
 * another kind, or was never given out.
 */


#ifndef IBGDA_H
#define IBGDA_H

#include <stddef.h>
#include <stdint.h>
/* Device handles, regions and status codes; in the device header's folder. */
#include <ibgda/types.h>


/**
 * Peers may read the memory.
 */
#define IBGDA_ACCESS_READ 1

/**
 * Peers may write it.
 */
#define IBGDA_ACCESS_WRITE 2

/**
 * Peers may use atomics on it.
 */
#define IBGDA_ACCESS_ATOMIC 4

/**
 * Register whole pages around a range that is not aligned, and keep its address and length.
 */
#define IBGDA_MAP_ROUND 256

/**
 * Bytes of a QP's address.
 */
#define IBGDA_ADDRESS_BYTES 64

/**
 * The queue can be waited for without polling: ibgda_cq_wait_event, ibgda_wait_for_cq_event.
 */
#define IBGDA_CQ_EVENTS 1

/**
 * The NIC keeps one completion, the last: for send queues, whose kernels then need IBGDA_COLLAPSED.
 */
#define IBGDA_CQ_COLLAPSED 2

/**
 * The best route that works.
 */
#define IBGDA_ROUTE_AUTO 0

/**
 * The GPU stores to the NIC's doorbell register.
 */
#define IBGDA_ROUTE_DIRECT 1

/**
 * The GPU stores to a word in host memory, which a thread of the library carries to the register. Kernels need
 * IBGDA_CPU_DOORBELL.
 */
#define IBGDA_ROUTE_CPU_DOORBELL 2

/**
 * The NIC is the ConnectX model in this process, in a library that was built with it: "loopback0" and on.
 */
#define IBGDA_ROUTE_LOOPBACK 3

/**
 * A thread of the library posts by verbs what kernels write, on any NIC that has verbs, without the broker. Kernels need
 * IBGDA_CPU_DOORBELL.
 */
#define IBGDA_ROUTE_PROXY 4

/**
 * The NIC was reset or taken away, or the right to it withdrawn: generation, reason.
 */
#define IBGDA_ASYNC_NIC_LOST 1

/**
 * The NIC is back and waits for ibgda_rebind: generation.
 */
#define IBGDA_ASYNC_NIC_RECOVERED 2

/**
 * A doorbell page was taken back: number is the broker's handle.
 */
#define IBGDA_ASYNC_DOORBELL_REVOKED 3

/**
 * Records of the broker were dropped: number of them.
 */
#define IBGDA_ASYNC_EVENTS_DROPPED 4

/**
 * A port went down: number is the port.
 */
#define IBGDA_ASYNC_PORT_DOWN 5

/**
 * A port became active: number is the port.
 */
#define IBGDA_ASYNC_PORT_ACTIVE 6

/**
 * Another asynchronous event of the verbs device: number is its ibv_event_type.
 */
#define IBGDA_ASYNC_VERBS 7

/**
 * A QP failed: number is the CQN; error has the rest.
 */
#define IBGDA_ASYNC_QUEUE_ERROR 8

/**
 * The NIC says that a QP failed, since it cannot read its queue or write its CQ: number is the QPN. This and the next
 * five are of QPs and CQs that are made while there is a callback.
 */
#define IBGDA_ASYNC_QP_CATASTROPHIC 9

/**
 * The NIC says that a QP failed at a request of its peer that it cannot answer: number is the QPN.
 */
#define IBGDA_ASYNC_QP_REQUEST_ERROR 10

/**
 * The NIC says that a QP failed at a request of its peer for memory that it may not use: number is the QPN.
 */
#define IBGDA_ASYNC_QP_ACCESS_ERROR 11

/**
 * A QP uses its alternate path: number is the QPN.
 */
#define IBGDA_ASYNC_PATH_MIGRATED 12

/**
 * A QP could not use its alternate path: number is the QPN.
 */
#define IBGDA_ASYNC_PATH_MIGRATION_FAILED 13

/**
 * The NIC says that a CQ takes no more completions: number is the CQN.
 */
#define IBGDA_ASYNC_CQ_ERROR 14

/**
 * A NIC and a GPU that may drive it.
 */
struct ibgda_context;

/**
 * One registered region, from which buffers are taken.
 */
struct ibgda_heap;

/**
 * A completion queue, host side; kernels use its `struct ibgda_cq`.
 */
struct ibgda_host_cq;

/**
 * A queue pair, host side; kernels use its `struct ibgda_qp`.
 */
struct ibgda_host_qp;

/**
 * Memory registered with a NIC.
 */
struct ibgda_mr;

/**
 * What to open.
 */
struct ibgda_open_attr {
  /**
   * sizeof(struct ibgda_open_attr)
   */
  uint32_t size;
  /**
   * The NIC's port, from 1.
   */
  uint32_t port;
  /**
   * The NIC: "mlx5_0", or "0000:03:00.0".
   */
  const char *nic;
  /**
   * The GPU: "0000:65:00.0".
   */
  const char *gpu;
  /**
   * IBGDA_ROUTE_*: how doorbells reach the NIC; 0 for the best that works.
   */
  uint32_t route;
  /**
   * 0.
   */
  uint32_t reserved;
};

/**
 * The broker's word on a NIC.
 */
struct ibgda_session_state {
  /**
   * IBGDA_STATE_* of the ioctl ABI: 1 ready, 2 lost, 3 recovered.
   */
  uint32_t state;
  /**
   * Generation the state is of.
   */
  uint32_t generation;
  /**
   * IBGDA_REASON_* of the last loss.
   */
  uint32_t reason;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * When it last changed, on CLOCK_MONOTONIC.
   */
  uint64_t changed_ns;
};

/**
 * What a queue pair is to be like. Zero in a field with a default means the default.
 */
struct ibgda_qp_attr {
  /**
   * sizeof(struct ibgda_qp_attr)
   */
  uint32_t size;
  /**
   * Send slots, a power of two up to 32768; default 128.
   */
  uint32_t send_depth;
  /**
   * Receive slots, a power of two from 4 to 32768; 0 for no receive queue.
   */
  uint32_t recv_depth;
  /**
   * IBGDA_ACCESS_*: what peers may do through this QP.
   */
  uint32_t access;
  /**
   * How long a kernel's post may wait for room, ns; default 2 s.
   */
  uint64_t post_timeout_ns;
  /**
   * How kernels use it: 0, or IBGDA_SHARED and IBGDA_BLUEFLAME of <ibgda/types.h>.
   */
  uint32_t mode;
  /**
   * 0.
   */
  uint32_t reserved;
};

/**
 * What a completion queue is to be like.
 */
struct ibgda_cq_attr {
  /**
   * sizeof(struct ibgda_cq_attr)
   */
  uint32_t size;
  /**
   * Entries, a power of two up to 32768; 0 means 128.
   */
  uint32_t entries;
  /**
   * IBGDA_CQ_*
   */
  uint32_t flags;
  /**
   * 0.
   */
  uint32_t reserved;
};

/**
 * Something that happened. A member that its kind does not name is 0.
 */
struct ibgda_async_event {
  /**
   * sizeof(struct ibgda_async_event) of the library
   */
  uint32_t size;
  /**
   * IBGDA_ASYNC_*
   */
  uint32_t kind;
  /**
   * Generation of the NIC, of its loss or return.
   */
  uint32_t generation;
  /**
   * IBGDA_REASON_* of the ioctl ABI.
   */
  uint32_t reason;
  /**
   * What the kind says.
   */
  uint32_t number;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * When, on CLOCK_MONOTONIC, ns.
   */
  uint64_t time_ns;
  /**
   * The first error of the CQ.
   */
  struct ibgda_error error;
  /**
   * What happened, with its values.
   */
  const char *what;
  /**
   * Why, as far as known; may be empty.
   */
  const char *why;
  /**
   * What to do about it; may be empty.
   */
  const char *advice;
};

/**
 * Called on a thread of the context's, one call at a time. The event and its texts are valid until it returns.
 */
typedef void (*ibgda_error_callback)(const struct ibgda_async_event *event, void *user);

/**
 * Numbers of a queue pair since it was made. Each is read by itself while kernels go on. Requests are counted in slots
 * of the send queue: one each, but two for those of two WQEs (ibgda_put_signal, IBGDA_FLUSH).
 */
struct ibgda_qp_counters {
  /**
   * sizeof(struct ibgda_qp_counters), set by the caller.
   */
  uint32_t size;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * Send slots that kernels have reserved.
   */
  uint64_t posted;
  /**
   * Of these, the NIC was told of.
   */
  uint64_t told;
  /**
   * Of these, known to have succeeded, as far as a kernel has looked at the CQ.
   */
  uint64_t completed;
  /**
   * The others, once one of them has failed: that one, and those flushed behind it.
   */
  uint64_t failed;
  /**
   * Receives posted.
   */
  uint64_t recv_posted;
  /**
   * Of these, known to have taken a message.
   */
  uint64_t recv_completed;
  /**
   * Doorbells that the library's thread has carried; 0 on other routes than cpu-doorbell.
   */
  uint64_t carried;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The sentence of the calling thread's last error: what failed, why, what to do. Valid until its next error.
 */
const char *ibgda_last_error(void);

/**
 * A device call's status in words, written into `buffer` and terminated, cut to `length`. EINVAL: no buffer.
 *
 * # Safety
 * `buffer` has `length` bytes.
 */
int ibgda_status_text(uint32_t status,
                      char *buffer,
                      size_t length);

/**
 * Binds a NIC and a GPU at the broker, opens the NIC, and takes the route that is asked for or the best that works
 * (ibgda_route_report says why not a better one). Errors as IBGDA_IOC_BIND, if a route was asked for that needs the
 * broker; ENETDOWN: port not active; EINVAL: no such route; EAGAIN: no thread for route cpu-doorbell or proxy.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_open(const struct ibgda_open_attr *attr,
               struct ibgda_context **context);

/**
 * Closes a context. What was made from it lives on until it is destroyed itself.
 *
 * # Safety
 * The context is null or of this library, and not used again.
 */
int ibgda_close(struct ibgda_context *context);

/**
 * Joins the NIC again after it was lost, waiting for it for at most `patience_ms`. No other thread may use the context.
 * EAGAIN, EHOSTDOWN: not back; ENETDOWN: back, but its port is not active yet; EACCES: no longer allowed; EINVAL: not
 * lost; EPERM: a forked child. If it fails, it may be called again.
 *
 * # Safety
 * The context is null or of this library, and no other thread uses it meanwhile.
 */
int ibgda_rebind(struct ibgda_context *context,
                 uint64_t patience_ms);

/**
 * Reads the broker's status page.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_get_state(const struct ibgda_context *context, struct ibgda_session_state *state);

/**
 * Makes memory usable by the NIC. `access`: IBGDA_ACCESS_*, and IBGDA_MAP_ROUND. EINVAL: zero, or not 4 KiB-aligned (the
 * error says how to round); EFAULT: not mapped; ENOMEM: RLIMIT_MEMLOCK.
 *
 * # Safety
 * The memory stays mapped until ibgda_unmap_device; the other arguments are null or valid.
 */
int ibgda_map_device(struct ibgda_context *context,
                     void *ptr,
                     size_t length,
                     uint32_t access,
                     struct ibgda_mr **mr);

/**
 * Takes the NIC's right to the memory back.
 *
 * # Safety
 * The region is null or of this library, and not used again.
 */
int ibgda_unmap_device(struct ibgda_mr *mr);

/**
 * Address, length and keys, for kernels and peers.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_mr_region(const struct ibgda_mr *mr, struct ibgda_region *region);

/**
 * Creates a completion queue of `entries` entries, a power of two up to 32768. It serves one work queue.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_create_cq(struct ibgda_context *context,
                    uint32_t entries,
                    struct ibgda_host_cq **cq);

/**
 * Destroys a completion queue, or lets its QP be the last to hold it. A thread in ibgda_cq_wait_event gets ECANCELED.
 *
 * # Safety
 * The queue is null or of this library, and not used again.
 */
int ibgda_destroy_cq(struct ibgda_host_cq *cq);

/**
 * What a kernel polls. Valid as long as the queue, or a QP that uses it.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_cq_device_handle(const struct ibgda_host_cq *cq, struct ibgda_cq **handle);

/**
 * Creates a queue pair with a doorbell page of its own. `recv_cq` is null exactly when attr's recv_depth is 0. EINVAL:
 * depths, or a CQ that is too small; EBUSY: a CQ that serves another queue; EOPNOTSUPP: IBGDA_BLUEFLAME, where writes do
 * not combine; also those of IBGDA_IOC_DOORBELL_IMPORT and IBGDA_IOC_QUEUE_ALLOC, and firmware's.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_create_qp(struct ibgda_context *context,
                    const struct ibgda_qp_attr *attr,
                    const struct ibgda_host_cq *send_cq,
                    const struct ibgda_host_cq *recv_cq,
                    struct ibgda_host_qp **qp);

/**
 * Destroys a queue pair.
 *
 * # Safety
 * The QP is null or of this library, and not used again, by a kernel neither.
 */
int ibgda_destroy_qp(struct ibgda_host_qp *qp);

/**
 * What the peer needs to connect to this QP: IBGDA_ADDRESS_BYTES bytes, to carry by any means.
 *
 * # Safety
 * The QP is null or valid, the address null or of IBGDA_ADDRESS_BYTES bytes.
 */
int ibgda_qp_address(const struct ibgda_host_qp *qp, uint8_t *address);

/**
 * Joins a QP to the peer whose address this is. EINVAL: not an address, and why; EISCONN: connected before.
 *
 * # Safety
 * The QP is null or valid, the address null or of `length` bytes.
 */
int ibgda_qp_connect(struct ibgda_host_qp *qp,
                     const void *address,
                     size_t length);

/**
 * Stops a QP: requests under way and later ones are flushed, each with an error completion.
 *
 * # Safety
 * The QP is null or valid.
 */
int ibgda_qp_stop(struct ibgda_host_qp *qp);

/**
 * What a kernel posts with. Valid as long as the QP; one thread at a time may use it, unless it is shared. Its `mode`
 * says what template argument the device calls need.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_qp_device_handle(const struct ibgda_host_qp *qp,
                           struct ibgda_qp **handle);

/**
 * Creates a completion queue that is as `attr` says. It serves one work queue. Errors as ibgda_create_cq; with
 * IBGDA_CQ_EVENTS also those of IBGDA_IOC_DOORBELL_IMPORT, and EAGAIN: no thread.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_create_cq_with(struct ibgda_context *context,
                         const struct ibgda_cq_attr *attr,
                         struct ibgda_host_cq **cq);

/**
 * Sleeps until there may be something to poll for in a queue made with IBGDA_CQ_EVENTS, at most until `deadline_ns` of
 * ibgda_clock_ns, and with 0 looks once. Arms the queue for completions behind those that its poller, a kernel or a
 * thread, has taken. ETIMEDOUT: nothing came; ENOLINK: the NIC was lost; ECANCELED: the queue is being destroyed;
 * EOPNOTSUPP: it was made without events.
 *
 * # Safety
 * None: the queue may be destroyed meanwhile.
 */
int ibgda_cq_wait_event(const struct ibgda_host_cq *cq,
                        uint64_t deadline_ns);

/**
 * Registers `length` bytes, from which buffers are taken afterwards: of the caller's memory at `memory`, as
 * ibgda_map_device does, or with NULL of memory that the library allocates. `access`: IBGDA_ACCESS_*, which all buffers
 * have. Errors as ibgda_map_device.
 *
 * # Safety
 * The memory is NULL, or stays mapped until ibgda_destroy_heap; the other arguments are null or valid.
 */
int ibgda_create_heap(struct ibgda_context *context,
                      void *memory,
                      size_t length,
                      uint32_t access,
                      struct ibgda_heap **heap);

/**
 * Ends a heap. EBUSY: buffers of it were not given back, and it is as before.
 *
 * # Safety
 * The heap is null or of this library, and not used again unless this fails.
 */
int ibgda_destroy_heap(struct ibgda_heap *heap);

/**
 * Takes `bytes` bytes at an address that is a multiple of `align`, a power of two; both are at least 64 in effect. Any
 * number of threads may do so. EINVAL: zero, or no power of two; ENOMEM: there is no such room, and how much there is.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_heap_alloc(struct ibgda_heap *heap,
                     uint64_t bytes,
                     uint64_t align,
                     struct ibgda_region *buffer);

/**
 * Gives a buffer back, when no request names it any more. EINVAL: no buffer of this heap begins there: it is another's,
 * or was given back before.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_heap_free(struct ibgda_heap *heap,
                    const struct ibgda_region *buffer);

/**
 * Address, length and keys of the whole heap.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_heap_region(const struct ibgda_heap *heap, struct ibgda_region *region);

/**
 * The route in use, IBGDA_ROUTE_*; never IBGDA_ROUTE_AUTO.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_get_route(const struct ibgda_context *context, uint32_t *route);

/**
 * Which route is used, and of each better one why it is not: a line for each, written into `buffer` and terminated, cut to
 * `length`. EINVAL: no buffer.
 *
 * # Safety
 * The context is null or valid; `buffer` is null or has `length` bytes.
 */
int ibgda_route_report(const struct ibgda_context *context,
                       char *buffer,
                       size_t length);

/**
 * Has `callback` called with `user` for what happens without being asked for: loss and return of the NIC, changes of
 * the port's state and other asynchronous events of the verbs device, the first error of each CQ once a kernel has
 * found it, and what the NIC says of QPs and CQs that are made while there is a callback; within 10 ms. NULL ends it.
 * What the broker has told before and nobody has heard comes first.
 *
 * The callback may call everything of this library, set another callback, and close the context, after which it is not
 * called again. It may not wait for a thread that closes the context or sets a callback: these wait until a call under
 * way has returned. It may not leave by an exception or longjmp. ibgda_last_error is the calling thread's own.
 *
 * When this returns, the former callback is not running and will not be called again, unless it is the caller.
 *
 * # Safety
 * The context is null or valid; the callback may be called with `user` on any thread until it is replaced or the
 * context closed.
 */
int ibgda_set_error_callback(struct ibgda_context *context,
                             ibgda_error_callback callback,
                             void *user);

/**
 * What a QP has done so far; no system call. Set counters->size first. EINVAL: a size that the struct never had.
 *
 * # Safety
 * The QP is null or valid; the counters are null or have `size` bytes.
 */
int ibgda_get_qp_counters(const struct ibgda_host_qp *qp,
                          struct ibgda_qp_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* IBGDA_H */
