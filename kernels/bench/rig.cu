/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "rig.cuh"

#include <ctime>
#include <sys/mman.h>
#include <unistd.h>

namespace bench {

static const size_t GPU_BYTES = 160u << 20, HOST_BYTES = 96u << 20;
static const size_t PAGE = 4096;
/* Registers for doorbells begin here in a UAR page. */
static const size_t BLUEFLAME_OFFSET = 0x800;
static const double PATIENCE_S = 30;

static double seconds()
{
	timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void cuda_check(cudaError_t error, const char *call, const char *file, int line)
{
	if (error == cudaSuccess)
		return;
	std::fflush(stdout);
	std::fprintf(stderr, "%s:%d: %s: %s (%s)\n", file, line, call, cudaGetErrorString(error), cudaGetErrorName(error));
	std::_Exit(2);
}

static void must(bool good, const char *call)
{
	if (good)
		return;
	std::perror(call);
	std::_Exit(2);
}

/* Host memory that the GPU sees at the same address. */
static void same_address(void *memory, const char *what)
{
	void *device = nullptr;
	CUDA(cudaHostGetDevicePointer(&device, memory, 0));
	if (device == memory)
		return;
	std::fprintf(stderr, "%s: the GPU sees host memory %p at %p; this program needs one address for both\n", what, memory, device);
	std::_Exit(2);
}

Rig::Rig()
{
	CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	CUDA(cudaMalloc(&gpu, GPU_BYTES));
	CUDA(cudaHostAlloc(&host, HOST_BYTES, cudaHostAllocMapped));
	same_address(host, "queues");
	CUDA(cudaHostAlloc(&outcomes, MAX_OUTCOMES * sizeof *outcomes, cudaHostAllocMapped));
	same_address(outcomes, "outcomes");
	CUDA(cudaHostAlloc(&words, PAGE, cudaHostAllocMapped));
	same_address(words, "words");

	/* As a UAR page comes to a process: pages of a file, mapped and then registered. */
	int fd = memfd_create("doorbells", 0);
	must(fd >= 0, "memfd_create");
	must(!ftruncate(fd, (off_t)(MAX_QUEUES * PAGE)), "ftruncate of the doorbell pages");
	void *mapped = mmap(nullptr, MAX_QUEUES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	must(mapped != MAP_FAILED, "mmap of the doorbell pages");
	close(fd);
	std::memset(mapped, 0, MAX_QUEUES * PAGE);
	CUDA(cudaHostRegister(mapped, MAX_QUEUES * PAGE, cudaHostRegisterMapped));
	same_address(mapped, "doorbells");
	pages = static_cast<uint8_t *>(mapped);
}

Rig::~Rig()
{
	cudaHostUnregister(pages);
	munmap(pages, MAX_QUEUES * PAGE);
	cudaFreeHost(words);
	cudaFreeHost(outcomes);
	cudaFreeHost(host);
	cudaFree(gpu);
	cudaStreamDestroy(stream);
}

void Rig::write_gpu(void *to, const void *from, size_t bytes)
{
	CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
	CUDA(cudaStreamSynchronize(stream));
}

void Rig::read(void *to, const void *from, size_t bytes)
{
	CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
	CUDA(cudaStreamSynchronize(stream));
}

/* Takes memory of a pool, piece after piece, with gaps. */
namespace {
class Pool {
	uint8_t *base;
	size_t bytes, used;

public:
	Pool(uint8_t *pool, size_t length, size_t begin) : base(pool), bytes(length), used(begin) {}
	uint8_t *take(size_t length, size_t align, size_t gap)
	{
		used = (used + gap + align - 1) & ~(align - 1);
		uint8_t *piece = base + used;
		used += length;
		if (used > bytes) {
			std::fprintf(stderr, "queues need more than the %zu bytes that rig.cu sets aside\n", bytes);
			std::_Exit(2);
		}
		return piece;
	}
	uint8_t *end() const { return base + used; }
};
} // namespace

Set Rig::lay_out(Where where, uint32_t count, uint32_t cq_depth, uint64_t producer, uint64_t completed, size_t handle_bytes,
		 unsigned placement)
{
	std::mt19937 random(placement * 2654435761u + 1);
	/* In lines of 128 bytes: anywhere for one QP, close together for many. */
	size_t lines = count == 1 ? 1024 : 8;
	auto gap = [&] { return random() % lines * 128; };
	size_t begin = random() % 4096 * PAGE;
	Pool gpu_pool(gpu, GPU_BYTES, begin), host_pool(host, HOST_BYTES, begin);
	Pool &send = where == Where::host ? host_pool : gpu_pool;
	Pool &completion = where == Where::gpu ? gpu_pool : host_pool;

	Set set;
	set.on_gpu = where != Where::host;
	set.stride = (handle_bytes + 127) & ~(size_t)127;
	set.handles = gpu_pool.take(count * set.stride, 128, gap());
	for (uint32_t i = 0; i < count; i++) {
		Queue queue;
		queue.ring = send.take(DEPTH * 64, PAGE, gap());
		queue.record = reinterpret_cast<uint32_t *>(send.take(128, 128, gap()));
		queue.doorbell = reinterpret_cast<uint64_t *>(pages + i * PAGE + BLUEFLAME_OFFSET);
		queue.cq = completion.take(cq_depth * 64, PAGE, gap());
		queue.cq_record = reinterpret_cast<uint32_t *>(completion.take(128, 128, gap()));
		queue.qpn = QPN + i;
		queue.cqn = 0x400 + i;
		queue.on_gpu = set.on_gpu;
		queue.depth = DEPTH;
		queue.cq_depth = cq_depth;
		queue.producer = producer;
		queue.completed = completed;
		set.queues.push_back(queue);
	}

	CUDA(cudaMemsetAsync(gpu + begin, 0xee, (size_t)(gpu_pool.end() - (gpu + begin)), stream));
	std::memset(host + begin, 0xee, (size_t)(host_pool.end() - (host + begin)));
	for (const Queue &queue : set.queues) {
		CUDA(cudaMemsetAsync(queue.record, 0, 8, stream));
		CUDA(cudaMemsetAsync(queue.cq_record, 0, 8, stream));
		CUDA(cudaMemsetAsync(queue.cq, 0xff, queue.cq_depth * 64, stream));
		*queue.doorbell = 0;
	}
	std::memset(outcomes, 0, MAX_OUTCOMES * sizeof *outcomes);
	CUDA(cudaStreamSynchronize(stream));
	return set;
}

void Rig::finish(const char *what)
{
	CUDA(cudaGetLastError());
	double give_up = seconds() + PATIENCE_S;
	cudaError_t error;
	while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
		if (seconds() > give_up) {
			std::fflush(stdout);
			std::fprintf(stderr, "%s: the kernel did not end within %.0f s\n", what, PATIENCE_S);
			std::_Exit(2);
		}
		usleep(50);
	}
	if (error != cudaSuccess)
		std::fprintf(stderr, "%s: the kernel failed\n", what);
	CUDA(error);
}

std::string Rig::check(const Set &set, const Plan &plan, bool record)
{
	uint64_t end = set.queues[0].producer + plan.total();
	/* All rings in one copy: they lie one after another. */
	const uint8_t *first = set.queues.front().ring, *last = set.queues.back().ring + DEPTH * 64;
	std::vector<uint8_t> copy;
	if (set.on_gpu) {
		copy.resize((size_t)(last - first));
		read(copy.data(), first, copy.size());
	}
	for (uint32_t i = 0; i < set.queues.size(); i++) {
		const Queue &queue = set.queues[i];
		Plan mine = plan;
		mine.rkey += i;
		std::string wrong =
			check_ring(set.on_gpu ? &copy[(size_t)(queue.ring - first)] : queue.ring, DEPTH, queue.producer, queue.qpn, mine);
		if (wrong.empty() && record) {
			uint32_t counters[2];
			read(counters, queue.record, sizeof counters);
			wrong = check_record(counters, end);
		}
		if (wrong.empty())
			wrong = check_doorbell(__atomic_load_n(queue.doorbell, __ATOMIC_ACQUIRE), end, queue.qpn);
		if (!wrong.empty())
			return "QP " + std::to_string(i) + ": " + wrong;
	}
	return "";
}

double Rig::elapsed_ns(uint32_t count) const
{
	uint64_t start = UINT64_MAX, end = 0;
	for (uint32_t i = 0; i < count; i++) {
		start = std::min(start, outcomes[i].start);
		end = std::max(end, outcomes[i].end);
	}
	return (double)(int64_t)(end - start);
}

uint64_t Rig::failures(uint32_t count) const
{
	uint64_t sum = 0;
	for (uint32_t i = 0; i < count; i++)
		sum += outcomes[i].failures;
	return sum;
}

bool Bench::wants(const std::string &metric) const
{
	return options.only.empty() || std::find(options.only.begin(), options.only.end(), metric) != options.only.end();
}

void Bench::add(const Row &row, const std::string &implementation, const std::vector<double> &values)
{
	static const double begin = seconds();
	Summary summary = summary_of(values);
	report.add(row, implementation, summary);
	std::fprintf(stderr, "%6.1f s  %s, %s: %s %s (%s to %s)\n", seconds() - begin, row.text().c_str(), implementation.c_str(),
		     number(summary.median).c_str(), row.unit.c_str(), number(summary.low).c_str(), number(summary.high).c_str());
}

void Bench::fail(const Row &row, const std::string &implementation, unsigned repeat, const std::string &what)
{
	std::string text = row.text() + ", " + implementation + ", repeat " + std::to_string(repeat) + ": " + what;
	std::fprintf(stderr, "FAILED %s\n", text.c_str());
	report.fail(text);
}

} // namespace bench
