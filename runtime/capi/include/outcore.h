/*
 * outcore: tensors that together are larger than the memory a program may use.
 *
 * Made of the sources in runtime/capi; do not edit. docs/c.md says how to begin.
 *
 * Handles. Types without a definition here are handles. A handle is no address: it is a number that the library knows,
 * of one kind. A handle that was closed or freed, or is of another kind, is told: the call fails with
 * OUTCORE_INVALID_ARGUMENT, or returns the NULL or 0 that its comment says, and does nothing. Whoever gets a handle from
 * a call closes or frees it, once; the order among handles does not matter. NULL may be closed or freed.
 *
 * Errors. Calls return a status. The last argument of calls that can fail in several ways is a place for an error: it
 * may be NULL. It is set to NULL by a call that succeeds, and otherwise to an error that the caller frees. A status other
 * than OUTCORE_OK and OUTCORE_NOT_READY comes with an error. Places for handles are set to NULL by calls that fail. The
 * library prints nothing and never exits. A panic in it, which is a bug, ends as OUTCORE_INTERNAL; only its message goes
 * to stderr.
 *
 * Arguments. Text ends with a zero and is UTF-8; paths may be any bytes. Text and arrays need to live only until the
 * call returns. Structures whose first field is `size` may get more fields at their end; set `size` to their sizeof.
 * Places for results are NULL or may be written; pointers that are neither NULL nor good are not told.
 *
 * Units. Sizes are bytes, times are nanoseconds, unless a name says otherwise. Extents of a shape are outermost first,
 * which is the other way round than in GGUF files.
 *
 * Threads. Any thread may call any function with any handle, also at the same time. A handle that one thread frees while
 * another one uses it lives until that call ends. The bytes of a guard may be read from any thread until it is ended;
 * those of a guard for writing as the threads agree. A call must run to its end: no pthread_cancel, no longjmp out of it,
 * and no call from a signal handler. In a child by fork() pins, and what opens something of a runtime, end with
 * OUTCORE_CLOSED; hints do nothing, and counters are zero.
 */

#ifndef OUTCORE_H
#define OUTCORE_H

#include <stddef.h>
#include <stdint.h>

/**
 * How a call ended. `OUTCORE_OK` is 0. Later versions may add numbers.
 */
typedef enum {
  /**
   * The call did what it is for.
   */
  OUTCORE_OK = 0,
  /**
   * An argument is outside what the call accepts: NULL, a handle that was freed, a name that does not exist.
   */
  OUTCORE_INVALID_ARGUMENT = 1,
  /**
   * A file, a tensor or another named thing does not exist.
   */
  OUTCORE_NOT_FOUND = 2,
  /**
   * The operating system refused access.
   */
  OUTCORE_PERMISSION_DENIED = 3,
  /**
   * A model file's header is malformed, truncated or wrong.
   */
  OUTCORE_FORMAT = 4,
  /**
   * The input is well-formed, but this library, or this machine's kernel, does not handle it.
   */
  OUTCORE_UNSUPPORTED = 5,
  /**
   * A budget cannot hold what was asked for as one unit.
   */
  OUTCORE_BUDGET_TOO_SMALL = 6,
  /**
   * A scope that holds guards asks for what others hold. It keeps what it holds. Unpin all its guards and try again,
   * pin what is needed as one set, or reserve it.
   */
  OUTCORE_BUSY = 7,
  /**
   * The operating system would not give memory or address space.
   */
  OUTCORE_OUT_OF_MEMORY = 8,
  /**
   * The process would need more memory mappings than the kernel allows it.
   */
  OUTCORE_TOO_MANY_MAPPINGS = 9,
  /**
   * Reading or writing failed.
   */
  OUTCORE_IO = 10,
  /**
   * Reading or writing took longer than the runtime's limit.
   */
  OUTCORE_TIMED_OUT = 11,
  /**
   * A device or its driver failed.
   */
  OUTCORE_DEVICE = 12,
  /**
   * The file system that holds the scratch file is full.
   */
  OUTCORE_DISK_FULL = 13,
  /**
   * Bytes read back differ from the bytes that were written or first read.
   */
  OUTCORE_CORRUPT = 14,
  /**
   * A model file changed while it was open.
   */
  OUTCORE_MODEL_CHANGED = 15,
  /**
   * The page's only valid bytes were lost to an earlier failure.
   */
  OUTCORE_POISONED = 16,
  /**
   * The runtime is closing or closed, or belongs to the process that this one was forked from.
   */
  OUTCORE_CLOSED = 17,
  /**
   * A broken internal invariant: a bug in outcore.
   */
  OUTCORE_INTERNAL = 18,
  /**
   * The time limit of this call passed, or it was not to wait. Nothing failed, and there is no error.
   */
  OUTCORE_NOT_READY = 100,
} outcore_status;

/**
 * Why a call failed: a status, a sentence that names the thing and the limit, and what can be done about it.
 *
 * Free it with `outcore_error_free`.
 */
typedef struct outcore_error outcore_error;

/**
 * Pinned tensors: while it lives their bytes stay where they are. End it with `outcore_unpin`.
 */
typedef struct outcore_guard outcore_guard;

/**
 * A file as a range of addresses: a touch of a page that is not there waits until it has been read. Close it with
 * `outcore_mapped_close`.
 */
typedef struct outcore_mapped outcore_mapped;

/**
 * An open model: its tensors by name and in the order of its header. Close it with `outcore_model_close`.
 */
typedef struct outcore_model outcore_model;

/**
 * An open runtime: its budgets, its policy, its threads. Close it with `outcore_runtime_close`.
 */
typedef struct outcore_runtime outcore_runtime;

/**
 * What one task holds and may still ask for. Close it with `outcore_scope_close`.
 */
typedef struct outcore_scope outcore_scope;

/**
 * A tensor, or some of its rows. It holds no bytes: pin it to use them. Free it with `outcore_tensor_free`.
 */
typedef struct outcore_tensor outcore_tensor;

/**
 * Text that a call made. Free it with `outcore_text_free`.
 */
typedef struct outcore_text outcore_text;

/**
 * One of several passes over a model, each with its own place in its own plan. Close it with `outcore_walker_close`.
 */
typedef struct outcore_walker outcore_walker;

/**
 * How to open a runtime. Set `size` to `sizeof(outcore_options)` and leave zero what shall have its default:
 * `outcore_options options = { .size = sizeof options, .device_budget = 64 << 20 };`
 *
 * Texts and paths are copied: they need to live only until the call returns.
 */
typedef struct {
  /**
   * sizeof(outcore_options)
   */
  size_t size;
  /**
   * "host" (the default), or "faulting", on which `outcore_mapped_open` works as well, with userfaultfd.
   */
  const char *device;
  /**
   * Bytes of memory for pages. 0: 1 GiB. It is never exceeded.
   */
  uint64_t device_budget;
  /**
   * Bytes of memory for a second tier, which takes pages that leave the first. 0: none.
   */
  uint64_t host_budget;
  /**
   * Bytes of a page: a power of two, 4096 or more. 0: 2 MiB, or what suits `for_model`.
   */
  uint64_t page_size;
  /**
   * The policy by its name: "plan" (the default; of the device "faulting" it is "model"), "lru", "arc", "kv" and
   * others; a wrong name is an error that lists them.
   */
  const char *policy;
  /**
   * The folder of the scratch file of tensors from `outcore_alloc`. NULL: a folder on a disk is looked for.
   */
  const char *scratch_dir;
  /**
   * The most bytes that the scratch file may hold. 0: what the disk has.
   */
  uint64_t scratch_budget;
  /**
   * A model file. Page size, lookahead and depth that are not set here follow from it and from its disk, which is
   * measured for that, unless it was before. NULL: none.
   */
  const char *for_model;
  /**
   * How far ahead of their use pages are read: "auto" (the default), "off", or a size such as "64MiB".
   */
  const char *lookahead;
  /**
   * How files are read: "auto" (the default), "io_uring", "threads", "buffered".
   */
  const char *io;
  /**
   * Whether checksums find bytes that change on their way: "off" (the default), "first", "always".
   */
  const char *verify;
  /**
   * Milliseconds after which a read or a write has failed. 0: two minutes. UINT64_MAX: never.
   */
  uint64_t io_timeout_ms;
} outcore_options;

/**
 * Counters since the runtime was opened. Set `size` to `sizeof(outcore_stats)` before the call. Bytes are bytes, times
 * are nanoseconds.
 */
typedef struct {
  /**
   * sizeof(outcore_stats)
   */
  size_t size;
  /**
   * Uses of pages.
   */
  uint64_t uses;
  /**
   * Uses that found their page there.
   */
  uint64_t hits;
  /**
   * Uses that had to wait for their page.
   */
  uint64_t faults;
  /**
   * Pages that went to make room.
   */
  uint64_t evictions;
  /**
   * Pages that were read before anybody asked for them.
   */
  uint64_t prefetched;
  /**
   * Bytes read from disks.
   */
  uint64_t disk_read;
  /**
   * Bytes written to the scratch file.
   */
  uint64_t disk_written;
  /**
   * Bytes of pages in the device tier now.
   */
  uint64_t device_used;
  /**
   * The most that it ever was.
   */
  uint64_t device_peak;
  /**
   * What it may be.
   */
  uint64_t device_budget;
  /**
   * Bytes of pages in the host tier now.
   */
  uint64_t host_used;
  /**
   * What it may be.
   */
  uint64_t host_budget;
  /**
   * Bytes of a page.
   */
  uint64_t page_size;
  /**
   * How long threads waited for pages, all together.
   */
  uint64_t stall_ns;
  /**
   * Requests that wait for what others hold, now.
   */
  uint64_t waiting;
} outcore_stats;

/**
 * What a tensor is. Set `size` to `sizeof(outcore_tensor_info)` before the call. Texts and `shape` live until the
 * tensor is freed.
 */
typedef struct {
  /**
   * sizeof(outcore_tensor_info)
   */
  size_t size;
  /**
   * Its name; "" for one from `outcore_alloc`.
   */
  const char *name;
  /**
   * Its element type as files call it, such as "F32" or "Q4_K".
   */
  const char *dtype;
  /**
   * Its extents, outermost first: as many as `rank`.
   */
  const uint64_t *shape;
  /**
   * How many extents it has.
   */
  size_t rank;
  /**
   * Its bytes.
   */
  uint64_t bytes;
  /**
   * How many pages it touches.
   */
  uint64_t pages;
  /**
   * Bytes of a page.
   */
  uint64_t page_size;
  /**
   * Its address for life. Only pinned bytes may be accessed there.
   */
  uint64_t address;
  /**
   * 1 if it can be pinned for writing, otherwise 0.
   */
  uint32_t writable;
  /**
   * The elements of a block of its type; 1 for plain types.
   */
  uint32_t block_elements;
  /**
   * The bytes of a block.
   */
  uint64_t block_bytes;
} outcore_tensor_info;

/**
 * How to pin. Set `size` to `sizeof(outcore_pin_options)` and leave zero what shall have its default.
 */
typedef struct {
  /**
   * sizeof(outcore_pin_options)
   */
  size_t size;
  /**
   * The scope of the task, if it holds guards and asks for more. NULL: none.
   */
  const outcore_scope *scope;
  /**
   * The walker whose use this is. NULL: none.
   */
  const outcore_walker *walker;
  /**
   * The most nanoseconds that the call may wait, if `has_timeout` is not 0. A limit of 0 pins what is in memory, and
   * waits for nothing.
   */
  uint64_t timeout_ns;
  /**
   * Not 0: `timeout_ns` is the limit. 0: the call waits until the pages are there.
   */
  int32_t has_timeout;
  /**
   * Not 0: to write. No other guard has the pages meanwhile. Only tensors from `outcore_alloc` can be written.
   */
  int32_t writes;
} outcore_pin_options;

/**
 * How to open a scope. Set `size` to `sizeof(outcore_scope_options)` and leave zero what shall have its default.
 */
typedef struct {
  /**
   * sizeof(outcore_scope_options)
   */
  size_t size;
  /**
   * A name, for errors and `outcore_waiting`. NULL: none.
   */
  const char *label;
  /**
   * "interactive" (the default), or "batch", which is served after it.
   */
  const char *priority;
  /**
   * The most bytes that the scope pins at a time, counted in whole pages, a page once for each pin of it. They are
   * set aside before it opens. 0: it sets nothing aside and pins as it goes.
   */
  uint64_t reserve;
} outcore_scope_options;

/**
 * Experts of one layer of a mixture, by their numbers in the model.
 */
typedef struct {
  /**
   * The layer's number in the model.
   */
  uint32_t layer;
  /**
   * The experts' numbers in the layer. NULL if there are none.
   */
  const uint32_t *experts;
  /**
   * How many experts there are.
   */
  size_t count;
} outcore_layer_experts;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The name of a status, such as "budget too small". Never NULL, also for numbers that are no status. The text lives as
 * long as the process.
 */
const char *outcore_status_name(int32_t status);

/**
 * The status that the failed call returned; `OUTCORE_INVALID_ARGUMENT` if `error` is no living error.
 */
outcore_status outcore_error_status(const outcore_error *error);

/**
 * What failed, and why, without the remedy. The text lives until the error is freed. NULL if `error` is no living
 * error.
 */
const char *outcore_error_message(const outcore_error *error);

/**
 * What can be done about it, or NULL if nothing is known. The text lives until the error is freed.
 */
const char *outcore_error_remedy(const outcore_error *error);

/**
 * Message and remedy on one line, for a log. The text lives until the error is freed. NULL if `error` is no living
 * error.
 */
const char *outcore_error_text(const outcore_error *error);

/**
 * 1 if the same call, unchanged, may succeed later: a disk may recover, room may be freed. Otherwise 0.
 */
int32_t outcore_error_is_transient(const outcore_error *error);

/**
 * Frees an error and its texts. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was freed
 * before.
 */
outcore_status outcore_error_free(outcore_error *error);

/**
 * The version of the library, such as "0.1.0". The text lives as long as the process.
 */
const char *outcore_version(void);

/**
 * Opens a runtime. `options` may be NULL: then all settings have their defaults.
 *
 * `*runtime` is the caller's, to be closed with `outcore_runtime_close`.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` for a setting that is none, `OUTCORE_BUDGET_TOO_SMALL` if the budget holds no
 * page, `OUTCORE_UNSUPPORTED` if this kernel lacks or forbids what the device needs.
 */
outcore_status outcore_runtime_open(const outcore_options *options, outcore_runtime **runtime, outcore_error **error);

/**
 * Closes a runtime: waiting requests of other threads end with `OUTCORE_CLOSED`, what is in flight is finished, and
 * the threads end. NULL is allowed. The handle is gone afterwards, also if this fails.
 *
 * Guards stay valid until they are unpinned; other handles made from the runtime stay handles, to be freed.
 *
 * Errors: what was lost and nobody was told of, such as pages that could not be written back; `OUTCORE_IO` if the disk
 * does not answer.
 */
outcore_status outcore_runtime_close(outcore_runtime *runtime,
                                     outcore_error **error);

/**
 * Changes the budget of the device tier, in bytes. To grow takes effect at once. To shrink returns when the memory was
 * given back: it waits for guards that are in the way.
 *
 * Errors: `OUTCORE_BUDGET_TOO_SMALL`, `OUTCORE_TOO_MANY_MAPPINGS`, `OUTCORE_OUT_OF_MEMORY`.
 */
outcore_status outcore_set_device_budget(const outcore_runtime *runtime,
                                         uint64_t bytes,
                                         outcore_error **error);

/**
 * Gives memory of frames back to the system until they are needed again, as much as it can of `bytes`. Budgets do not
 * change. `given` may be NULL; otherwise it gets how many bytes it was.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_trim(const outcore_runtime *runtime, uint64_t bytes, uint64_t *given, outcore_error **error);

/**
 * Writes the counters to `*stats`, whose field `size` the caller has set.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_stats_read(const outcore_runtime *runtime, outcore_stats *stats, outcore_error **error);

/**
 * All that the runtime counts, as one JSON object. Sizes in it are bytes, times are seconds with a fraction.
 *
 * `*json` is the caller's, to be freed with `outcore_text_free`.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_stats_json(const outcore_runtime *runtime, outcore_text **json, outcore_error **error);

/**
 * Who waits for what, and who holds it, a line for each request: look here if nothing goes on. Empty if nobody waits.
 *
 * `*text` is the caller's, to be freed with `outcore_text_free`.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_waiting(const outcore_runtime *runtime, outcore_text **text, outcore_error **error);

/**
 * Failures that no call told of, such as pages that stay in memory because the disk does not take them. Returns the
 * status of the first and gives it as the error; `OUTCORE_OK` if there are none.
 */
outcore_status outcore_health(const outcore_runtime *runtime, outcore_error **error);

/**
 * The characters of a text, which ends with a zero, in UTF-8. They live until the text is freed. NULL if `text` is no
 * living text.
 */
const char *outcore_text_chars(const outcore_text *text);

/**
 * How many bytes a text has, without the zero at its end. 0 if `text` is no living text.
 */
size_t outcore_text_length(const outcore_text *text);

/**
 * Frees a text. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was freed before.
 */
outcore_status outcore_text_free(outcore_text *text);

/**
 * Opens a GGUF or safetensors file where it lies; or a model in several files, by its index or by any of the files; or
 * the one model in a folder. Reads headers only. Files of one model are one list of tensors: those of its first file
 * come first.
 *
 * `*model` is the caller's, to be closed with `outcore_model_close`.
 *
 * Errors: `OUTCORE_NOT_FOUND`, which names the file that is missing, `OUTCORE_PERMISSION_DENIED`, `OUTCORE_FORMAT`,
 * also for files that are not of one model and for an index that names a file outside of its folder,
 * `OUTCORE_INVALID_ARGUMENT` for a folder with several models, `OUTCORE_UNSUPPORTED` for a type of element that is not
 * known, `OUTCORE_CLOSED`.
 */
outcore_status outcore_model_open(const outcore_runtime *runtime,
                                  const char *path,
                                  outcore_model **model,
                                  outcore_error **error);

/**
 * Closes a model. NULL is allowed. Tensors and guards of it stay. Returns `OUTCORE_INVALID_ARGUMENT`, and does
 * nothing, if it was closed before.
 */
outcore_status outcore_model_close(outcore_model *model);

/**
 * How many tensors a model has. 0 if `model` is no living model.
 */
size_t outcore_model_count(const outcore_model *model);

/**
 * The name of a tensor by its index, in the order of the header. It lives until the model is closed. NULL if there is
 * no such tensor, or `model` is no living model.
 */
const char *outcore_model_name(const outcore_model *model, size_t index);

/**
 * A tensor by its name.
 *
 * `*tensor` is the caller's, to be freed with `outcore_tensor_free`; it does not need `model` any more.
 *
 * Errors: `OUTCORE_NOT_FOUND`, which names a similar tensor.
 */
outcore_status outcore_model_tensor(const outcore_model *model,
                                    const char *name,
                                    outcore_tensor **tensor,
                                    outcore_error **error);

/**
 * A tensor by its index, in the order of the header: for names that are no text of C.
 *
 * `*tensor` is the caller's, to be freed with `outcore_tensor_free`; it does not need `model` any more.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` if there is no such tensor.
 */
outcore_status outcore_model_tensor_at(const outcore_model *model,
                                       size_t index,
                                       outcore_tensor **tensor,
                                       outcore_error **error);

/**
 * Where a tensor's bytes lie, by its index: the file, by its number within the model, and the first byte there. Each
 * place may be NULL.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` if there is no such tensor.
 */
outcore_status outcore_model_place(const outcore_model *model,
                                   size_t index,
                                   uint32_t *file,
                                   uint64_t *offset,
                                   outcore_error **error);

/**
 * The path of a file of the model, by its number. It lives until the model is closed. NULL if there is no such file,
 * or `model` is no living model.
 */
const char *outcore_model_file(const outcore_model *model, uint32_t file);

/**
 * Writes what a tensor is to `*info`, whose field `size` the caller has set.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_tensor_describe(const outcore_tensor *tensor,
                                       outcore_tensor_info *info,
                                       outcore_error **error);

/**
 * Rows `first` to `end` (without `end`) of the outermost extent, as a tensor of their own. To pin it brings only the
 * pages that it touches. So an expert of a tensor of experts is rows `n` to `n + 1`.
 *
 * `*rows` is the caller's, to be freed with `outcore_tensor_free`; it does not need `tensor` any more.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` if it has no such rows.
 */
outcore_status outcore_tensor_rows(const outcore_tensor *tensor,
                                   uint64_t first,
                                   uint64_t end,
                                   outcore_tensor **rows,
                                   outcore_error **error);

/**
 * Allocates a read-write tensor of zeros, which may be larger than memory: what does not fit goes to a scratch file.
 * `dtype` is a name such as "F32", `shape` has `rank` extents, outermost first.
 *
 * `*tensor` is the caller's, to be freed with `outcore_tensor_free`. Its bytes are gone with its last handle.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` for a type or a shape that is none, `OUTCORE_DISK_FULL`,
 * `OUTCORE_BUDGET_TOO_SMALL` beyond the scratch budget, `OUTCORE_CLOSED`.
 */
outcore_status outcore_alloc(const outcore_runtime *runtime,
                             const char *dtype,
                             const uint64_t *shape,
                             size_t rank,
                             outcore_tensor **tensor,
                             outcore_error **error);

/**
 * Frees a handle of a tensor. NULL is allowed. Guards and rows of it stay. Returns `OUTCORE_INVALID_ARGUMENT`, and
 * does nothing, if it was freed before.
 */
outcore_status outcore_tensor_free(outcore_tensor *tensor);

/**
 * Suggests that a tensor will be used soon. A hint: where there is no room for it, nothing happens. Does not wait.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_prefetch(const outcore_runtime *runtime, const outcore_tensor *tensor, outcore_error **error);

/**
 * Evicts a tensor's pages, as far as no guard forbids it. `pages` may be NULL; otherwise it gets how many it were.
 * Does not wait: what was written is written back in the background.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_evict(const outcore_runtime *runtime,
                             const outcore_tensor *tensor,
                             uint32_t *pages,
                             outcore_error **error);

/**
 * Declares the order in which tensors will be used by pins without a walker, so that pages come before they are
 * wanted; repeated for ever if `cyclic` is not 0. With `count` 0 the plan is withdrawn. A policy that follows no plans
 * ignores it.
 *
 * The handles may be freed afterwards.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_plan(const outcore_runtime *runtime,
                            outcore_tensor *const *tensors,
                            size_t count,
                            int32_t cyclic,
                            outcore_error **error);

/**
 * Pins a tensor: brings its pages into memory, and keeps them there until `outcore_unpin`. `options` may be NULL: then
 * it is pinned for reading, outside of scopes, and the call waits as long as that takes, at the disk and for guards of
 * others. Any number of guards may read a tensor; one may write it.
 *
 * With a limit it returns `OUTCORE_NOT_READY` if that passes, with `*guard` NULL and no error; reads that
 * began go on, and with a limit of 0 a missing page is on its way, if there is room.
 *
 * A thread that holds guards and asks for more should do so in a scope, or for all at once with `outcore_pin_set`:
 * otherwise threads may wait for each other for ever, which outcore cannot tell.
 *
 * `*guard` is the caller's, to be ended with `outcore_unpin`. It needs neither `tensor` nor `runtime` any more.
 *
 * Errors: `OUTCORE_BUDGET_TOO_SMALL` if its pages can never be there together (pin rows of it), or are more than the
 * scope reserved; `OUTCORE_BUSY` if the scope holds guards, and others have the pages or the frames; `OUTCORE_IO`,
 * `OUTCORE_TIMED_OUT`, `OUTCORE_MODEL_CHANGED`, `OUTCORE_POISONED`, `OUTCORE_CLOSED`; `OUTCORE_INVALID_ARGUMENT` to
 * write a tensor of a model, and for a scope or a walker of another runtime.
 */
outcore_status outcore_pin(const outcore_runtime *runtime,
                           const outcore_tensor *tensor,
                           const outcore_pin_options *options,
                           outcore_guard **guard,
                           outcore_error **error);

/**
 * Pins several tensors as a unit: all or none. So two threads that need sets never hold half each. The tensors are
 * those of `outcore_guard_data_at`, in the same order. Of those to write no two may share a byte. Otherwise as
 * `outcore_pin`.
 *
 * Errors: as for `outcore_pin`.
 */
outcore_status outcore_pin_set(const outcore_runtime *runtime,
                               outcore_tensor *const *tensors,
                               size_t count,
                               const outcore_pin_options *options,
                               outcore_guard **guard,
                               outcore_error **error);

/**
 * Ends a guard: nobody may use its bytes from here on. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does
 * nothing, if it was ended before.
 */
outcore_status outcore_unpin(outcore_guard *guard);

/**
 * The bytes that a guard has pinned; of a set, those of its first tensor. They may be read until it is ended. NULL if
 * `guard` is no living guard.
 */
const void *outcore_guard_data(const outcore_guard *guard);

/**
 * The same, to be written; NULL if the guard is for reading only.
 */
void *outcore_guard_data_mut(const outcore_guard *guard);

/**
 * How many bytes there are. 0 if `guard` is no living guard.
 */
size_t outcore_guard_length(const outcore_guard *guard);

/**
 * How many tensors a guard has pinned. 0 if `guard` is no living guard.
 */
size_t outcore_guard_count(const outcore_guard *guard);

/**
 * The bytes of a tensor of a set, by its index. NULL if there is none.
 */
const void *outcore_guard_data_at(const outcore_guard *guard, size_t index);

/**
 * The same, to be written; NULL if the guard is for reading only.
 */
void *outcore_guard_data_mut_at(const outcore_guard *guard, size_t index);

/**
 * How many bytes a tensor of a set has, by its index. 0 if there is none.
 */
size_t outcore_guard_length_at(const outcore_guard *guard, size_t index);

/**
 * Opens a scope, for a task that holds guards and asks for more: it names the scope in `outcore_pin_options`.
 * `options` may be NULL.
 *
 * With `reserve` it waits until so much is set aside, and its pins draw on that. Without, it pins as it goes. While it
 * holds guards, its pins never wait for guards of others: if these have what a pin asks for, it returns
 * `OUTCORE_BUSY` at once, and the scope keeps what it holds. Then unpin all its guards and try again, pin what is
 * needed with `outcore_pin_set`, or `reserve` it. A scope without guards waits as `outcore_pin` does.
 *
 * `*scope` is the caller's, to be closed with `outcore_scope_close`. Guards may outlive it. One scope is for one task:
 * its pins should not wait for each other's end.
 *
 * Errors: `OUTCORE_BUDGET_TOO_SMALL` if there can never be so much, `OUTCORE_CLOSED`.
 */
outcore_status outcore_scope_open(const outcore_runtime *runtime,
                                  const outcore_scope_options *options,
                                  outcore_scope **scope,
                                  outcore_error **error);

/**
 * Closes a scope: what was set aside for it is given back. NULL is allowed. Its guards stay. Returns
 * `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was closed before.
 */
outcore_status outcore_scope_close(outcore_scope *scope);

/**
 * Bytes of the pages that a scope has pinned, a page once for each pin. 0 if `scope` is no living scope.
 */
uint64_t outcore_scope_held(const outcore_scope *scope);

/**
 * Begins a pass over a model, for programs with several passes at a time. A program with one needs no walker.
 *
 * `*walker` is the caller's, to be closed with `outcore_walker_close`.
 *
 * Errors: `OUTCORE_CLOSED`.
 */
outcore_status outcore_walker_open(const outcore_runtime *runtime, outcore_walker **walker, outcore_error **error);

/**
 * Ends a pass. NULL is allowed. Its guards stay. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if
 * it was closed before.
 */
outcore_status outcore_walker_close(outcore_walker *walker);

/**
 * Declares the order in which a walker will use tensors from now on: as `outcore_plan` for pins without one. Walkers
 * that declare the same order share one plan.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_walker_plan(const outcore_walker *walker,
                                   outcore_tensor *const *tensors,
                                   size_t count,
                                   int32_t cyclic,
                                   outcore_error **error);

/**
 * Maps a whole file, of any format, for reading. The runtime's device must be "faulting". Reads nothing yet. Files of
 * one model share its order of use and its experts: map each. A file whose model is not whole is mapped alone.
 *
 * `*mapped` is the caller's, to be closed with `outcore_mapped_close`.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` for another device or no regular file, `OUTCORE_BUDGET_TOO_SMALL` if the budget
 * has less than four pages, `OUTCORE_NOT_FOUND`, `OUTCORE_PERMISSION_DENIED`, `OUTCORE_CLOSED`.
 */
outcore_status outcore_mapped_open(const outcore_runtime *runtime,
                                   const char *path,
                                   outcore_mapped **mapped,
                                   outcore_error **error);

/**
 * The first address of a mapped file. It is the same until the file is closed, and may be read from any thread. A page
 * that cannot be read is SIGBUS, as with mmap. NULL if `mapped` is no living mapped file.
 */
const void *outcore_mapped_data(const outcore_mapped *mapped);

/**
 * How many bytes a mapped file has. 0 if `mapped` is no living mapped file.
 */
size_t outcore_mapped_length(const outcore_mapped *mapped);

/**
 * 1 if the model of a mapped file has this expert, by the layer's and the expert's number in the model; else 0.
 */
int32_t outcore_mapped_has_expert(const outcore_mapped *mapped, uint32_t layer, uint32_t expert);

/**
 * These `count` experts of a layer are used next, in this order: for programs that know what the router has chosen.
 * All that is missing of them is read at once. The call returns when it is there. Together they may have a quarter of
 * the frames: what is more comes when it is touched.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` if its model has no such expert, or there is no such mapped file; `OUTCORE_BUSY`
 * if guards have held the frames for a second; those of `outcore_pin`. Nothing is lost then: what is missing is read
 * when it is touched.
 */
outcore_status outcore_mapped_expert_hint(const outcore_mapped *mapped,
                                          uint32_t layer,
                                          const uint32_t *experts,
                                          size_t count,
                                          outcore_error **error);

/**
 * As `outcore_mapped_expert_hint` of `now`, and as `outcore_mapped_expect_experts` of the `count` layers at `next`:
 * the disk goes on with these as soon as it has no more of `now` to read.
 *
 * Errors: as for both. If the file has not an expert of `next`, nothing is read.
 */
outcore_status outcore_mapped_expert_hint_before(const outcore_mapped *mapped,
                                                 const outcore_layer_experts *now,
                                                 const outcore_layer_experts *next,
                                                 size_t count,
                                                 outcore_error **error);

/**
 * These experts of the `count` layers at `layers` are likely to be used soon, in this order of layers, and of each
 * layer the most likely first: for programs that predict what the router will choose. They take the place of all that
 * was expected before. What is missing of them is read while nothing else waits for the disk. Returns at once.
 * Together they may have a quarter of the frames: what is more is left out. Each is compared with what is told later,
 * and what is seldom right is not read.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` if its model has no such expert, or there is no such mapped file.
 */
outcore_status outcore_mapped_expect_experts(const outcore_mapped *mapped,
                                             const outcore_layer_experts *layers,
                                             size_t count,
                                             outcore_error **error);

/**
 * Why a page could not be read: the first failure. Returns `OUTCORE_OK` if all could.
 */
outcore_status outcore_mapped_failure(const outcore_mapped *mapped, outcore_error **error);

/**
 * A mapped file as a tensor of bytes, with the same addresses: a page of it that is pinned is there.
 *
 * `*tensor` is the caller's, to be freed with `outcore_tensor_free`.
 *
 * Errors: `OUTCORE_INVALID_ARGUMENT` only.
 */
outcore_status outcore_mapped_tensor(const outcore_mapped *mapped, outcore_tensor **tensor, outcore_error **error);

/**
 * Closes a mapped file. NULL is allowed. Nobody may touch its addresses from here on, nor be in a touch of one.
 * Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was closed before.
 */
outcore_status outcore_mapped_close(outcore_mapped *mapped);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* OUTCORE_H */
