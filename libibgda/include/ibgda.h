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
 * In retry_count and rnr_retry of struct ibgda_qp_attr: none.
 */
#define IBGDA_NO_RETRIES UINT32_MAX

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
 * Memory for one queue, exported as a dma-buf.
 */
struct ibgda_queue_memory;

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
  /**
   * How long the NIC waits for an acknowledgement: 4.096 us * 2^n, 1 to 31; default 14.
   */
  uint32_t ack_timeout;
  /**
   * Retries before a request fails, 1 to 7; default 7; IBGDA_NO_RETRIES.
   */
  uint32_t retry_count;
  /**
   * Retries when the peer has no receive posted, 1 to 6; default 6; IBGDA_NO_RETRIES.
   */
  uint32_t rnr_retry;
  /**
   * 0.
   */
  uint32_t reserved1;
  /**
   * Where its queues lie, ibgda_qp_memory_bytes long; NULL: in memory of the host. On route direct only.
   */
  const struct ibgda_queue_memory *memory;
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
  /**
   * Where it lies, ibgda_cq_memory_bytes long; NULL: in memory of the host. On route direct only, and not with
   * IBGDA_CQ_EVENTS.
   */
  const struct ibgda_queue_memory *memory;
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
 * What a kernel of a GPU posts with: a struct ibgda_qp in the GPU's memory, to be passed to kernels and not read by the
 * host. `gpu` is its PCI address, or NULL for the GPU that the context was opened with. The first call makes it, and
 * from then on kernels of that GPU alone use the QP; valid as long as the QP, which no kernel may outlast. ENODEV: no
 * CUDA, or no such GPU; EBUSY: another GPU has it; EPERM: NVIDIA's driver does not let this process have the doorbell,
 * and ibgda_last_error says what opens its gate; others of CUDA's.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_qp_device_handle_on(const struct ibgda_host_qp *qp,
                              const char *gpu,
                              struct ibgda_qp **handle);

/**
 * Where a GPU sees the first byte of a heap whose memory the library has allocated, for kernels that read and write it
 * themselves; requests name it by the addresses of ibgda_heap_alloc all the same. `gpu` as of
 * ibgda_qp_device_handle_on. Valid as long as the heap. EINVAL: the memory is the caller's own, who registers it with
 * CUDA; EBUSY: it was asked for with another GPU; ENODEV, and CUDA's of registering it.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_heap_device_pointer_on(const struct ibgda_heap *heap,
                                 const char *gpu,
                                 void **pointer);

/**
 * The first error that kernels and threads have found of a QP: of its send queue, or else of its receive queue. Its
 * status is IBGDA_OK if there is none. Of a GPU's kernels it waits for those of the default stream.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_qp_error(const struct ibgda_host_qp *qp,
                   struct ibgda_error *error);

/**
 * An error in words, written into `buffer` and terminated, cut to `length`: which request of which QP failed, why, and
 * what to do. EINVAL: no error, or no buffer.
 *
 * # Safety
 * The error is null or valid; `buffer` is null or has `length` bytes.
 */
int ibgda_error_text(const struct ibgda_error *error,
                     char *buffer,
                     size_t length);

/**
 * Bytes that the queues of a QP with such an attribute take, for its memory.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_qp_memory_bytes(const struct ibgda_qp_attr *attr, size_t *bytes);

/**
 * Bytes that a CQ with such an attribute takes, for its memory.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_cq_memory_bytes(const struct ibgda_cq_attr *attr, size_t *bytes);

/**
 * Allocates at least `length` bytes of a GPU's memory for one queue, and exports them as a dma-buf. `gpu` as of
 * ibgda_qp_device_handle_on. ENODEV: no CUDA, or no such GPU; EOPNOTSUPP: it exports none; others of CUDA's.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_alloc_queue_memory(struct ibgda_context *context,
                             const char *gpu,
                             size_t length,
                             struct ibgda_queue_memory **memory);

/**
 * Takes `length` bytes from byte `offset` of a dma-buf on, mapped at `address` for this process's processors, for one
 * queue whose requests threads of the host post; a GPU's kernels need memory of ibgda_alloc_queue_memory. The file may be
 * closed afterwards. EINVAL: offset, address or length are no multiples of 4096, address or length are zero, or the
 * address is of a GPU's memory; EBADF: no file.
 *
 * # Safety
 * Those bytes are mapped there for reading and writing until the memory and the queue in it are destroyed, and nobody
 * else uses them; `memory` is null or valid.
 */
int ibgda_import_queue_memory(int dmabuf,
                              uint64_t offset,
                              void *address,
                              size_t length,
                              struct ibgda_queue_memory **memory);

/**
 * Lets go of queue memory. A queue in it keeps it.
 *
 * # Safety
 * The memory is null or of this library, and not used again.
 */
int ibgda_destroy_queue_memory(struct ibgda_queue_memory *memory);

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
