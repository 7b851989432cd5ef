// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A small communicator on libibgda's C calls: processes of one machine exchange a block with each other, some rounds of it,
// and check every byte. What a communication library does besides is its own: how ranks find each other (here the parent
// passes what each has to say to all), and where the kernels run (here on a thread; the same source compiles with nvcc).
//
//   communicator GPU NIC [NIC…] [--ranks N] [--rounds N]
//
//   c++ -std=c++17 communicator.cpp -o communicator $(pkg-config --cflags --libs ibgda)
#define IBGDA_HOST
#include "exchange.cuh"

#include <ibgda.h>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{
constexpr std::uint64_t PATIENCE_NS = 30'000'000'000;

void check(int error)
{
	if (error)
		throw std::runtime_error(ibgda_last_error());
}

/* Of what was done with another rank. */
void check(ibgda_status status, const char *what, unsigned peer)
{
	if (status == IBGDA_OK)
		return;
	char text[512];
	check(ibgda_status_text(status, text, sizeof(text)));
	/* The others are to find the rank that failed first, and not that this one has ended for it. */
	sleep(2);
	const char *gone = status == IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED ? " is gone, or cannot be reached" : "";
	throw std::runtime_error("rank " + std::to_string(peer) + gone + ": " + what + ": " + text);
}

/* An object of the library, destroyed with its owner. */
template <class T, int (*DESTROY)(T *)> struct Destroy {
	void operator()(T *object) const { DESTROY(object); }
};
using Context = std::unique_ptr<ibgda_context, Destroy<ibgda_context, ibgda_close>>;
using Region = std::unique_ptr<ibgda_mr, Destroy<ibgda_mr, ibgda_unmap_device>>;
using Cq = std::unique_ptr<ibgda_host_cq, Destroy<ibgda_host_cq, ibgda_destroy_cq>>;
using Qp = std::unique_ptr<ibgda_host_qp, Destroy<ibgda_host_qp, ibgda_destroy_qp>>;

/* What each rank tells all others: its window, and the address of its queue pair to each of them. */
struct Card {
	ibgda_region window;
	std::uint8_t addresses[MOST_RANKS][IBGDA_ADDRESS_BYTES];
};

void transfer(bool sends, int socket, void *data, std::size_t bytes)
{
	for (auto *at = static_cast<char *>(data); bytes;) {
		ssize_t done = sends ? send(socket, at, bytes, MSG_NOSIGNAL) : recv(socket, at, bytes, 0);
		if (done <= 0)
			throw std::runtime_error("another rank has ended");
		at += done;
		bytes -= static_cast<std::size_t>(done);
	}
}

/* Gives every rank's card to every rank, by way of the parent. */
std::vector<Card> share(int parent, Card mine, unsigned size)
{
	std::vector<Card> cards(size);
	transfer(true, parent, &mine, sizeof(mine));
	transfer(false, parent, cards.data(), size * sizeof(Card));
	return cards;
}

unsigned char pattern(unsigned from, unsigned to, unsigned round, unsigned at)
{
	return static_cast<unsigned char>(at * 13 + (at >> 8) * 7 + from * 59 + to * 101 + round * 29);
}

void run(unsigned rank, unsigned size, const char *gpu, const char *nic, unsigned rounds, int parent)
{
	auto *own = static_cast<window *>(std::aligned_alloc(4096, (sizeof(window) + 4095) / 4096 * 4096));
	if (!own)
		throw std::bad_alloc();
	std::unique_ptr<window, decltype(&std::free)> memory(own, &std::free);
	std::memset(static_cast<void *>(own), 0, sizeof(window));

	ibgda_open_attr open = {};
	open.size = sizeof(open);
	open.port = 1;
	open.nic = nic;
	open.gpu = gpu;
	ibgda_context *opened = nullptr;
	check(ibgda_open(&open, &opened));
	Context context(opened);
	ibgda_mr *mapped = nullptr;
	check(ibgda_map_device(opened, own, sizeof(window), IBGDA_ACCESS_WRITE | IBGDA_MAP_ROUND, &mapped));
	Region region(mapped);

	team team = {};
	team.rank = rank;
	team.size = size;
	team.own = own;
	check(ibgda_mr_region(mapped, &team.region));

	Card card = {};
	card.window = team.region;
	std::vector<Qp> qps(size);
	for (unsigned peer = 0; peer < size; peer++) {
		if (peer == rank)
			continue;
		ibgda_host_cq *cq = nullptr;
		check(ibgda_create_cq(opened, 64, &cq));
		Cq made(cq);
		ibgda_qp_attr attr = {};
		attr.size = sizeof(attr);
		attr.send_depth = 64;
		attr.access = IBGDA_ACCESS_WRITE;
		ibgda_host_qp *qp = nullptr;
		check(ibgda_create_qp(opened, &attr, cq, nullptr, &qp));
		qps[peer].reset(qp);
		check(ibgda_qp_address(qp, card.addresses[peer]));
		check(ibgda_qp_device_handle(qp, &team.qps[peer]));
	}
	auto cards = share(parent, card, size);
	for (unsigned peer = 0; peer < size; peer++) {
		team.windows[peer] = cards[peer].window;
		if (peer != rank)
			check(ibgda_qp_connect(qps[peer].get(), cards[peer].addresses[rank], IBGDA_ADDRESS_BYTES));
	}
	/* Nobody posts before all are connected. */
	share(parent, card, size);

	ibgda_u32 failed = 0;
	for (unsigned round = 1; round <= rounds; round++) {
		for (unsigned peer = 0; peer < size; peer++)
			for (unsigned at = 0; at < BLOCK_BYTES; at++)
				own->out[peer][at] = pattern(rank, peer, round, at);
		ibgda_status status = exchange(team, round, ibgda_clock_ns() + PATIENCE_NS, failed);
		check(status, "exchange", failed);
		for (unsigned peer = 0; peer < size; peer++)
			for (unsigned at = 0; peer != rank && at < BLOCK_BYTES; at++)
				if (own->in[peer][at] != pattern(peer, rank, round, at))
					throw std::runtime_error("round " + std::to_string(round) + ": byte " + std::to_string(at) +
								 " of rank " + std::to_string(peer) + "'s block is wrong");
		status = acknowledge(team, round, failed);
		check(status, "acknowledge", failed);
	}
	for (unsigned peer = 0; peer < size; peer++)
		if (peer != rank)
			check(ibgda_quiet(team.qps[peer], ibgda_clock_ns() + PATIENCE_NS), "the last acknowledgements", peer);
	/* Nobody ends while another still writes to it. */
	share(parent, card, size);
	std::printf("rank %u on NIC %s: %u rounds with %u peers, every byte right\n", rank, nic, rounds, size - 1);
}

/* The parent's part: what each rank says goes to all. */
void pass_on(const std::vector<int> &ranks)
{
	std::vector<Card> cards(ranks.size());
	for (int times = 0; times < 3; times++) {
		for (std::size_t rank = 0; rank < ranks.size(); rank++)
			transfer(false, ranks[rank], &cards[rank], sizeof(Card));
		for (int rank : ranks)
			transfer(true, rank, cards.data(), cards.size() * sizeof(Card));
	}
}

unsigned number(const char *text, const char *what, unsigned least, unsigned most)
{
	char *end = nullptr;
	unsigned long value = text ? std::strtoul(text, &end, 10) : 0;
	if (!text || *end || end == text || value < least || value > most)
		throw std::runtime_error(std::string(what) + " is a number from " + std::to_string(least) + " to " + std::to_string(most));
	return static_cast<unsigned>(value);
}
} // namespace

int main(int argc, char **argv)
try {
	unsigned size = 2, rounds = 8;
	std::vector<const char *> words;
	for (int i = 1; i < argc; i++) {
		if (!std::strcmp(argv[i], "--ranks"))
			size = number(argv[++i], "--ranks", 2, MOST_RANKS);
		else if (!std::strcmp(argv[i], "--rounds"))
			rounds = number(argv[++i], "--rounds", 1, 1'000'000);
		else if (argv[i][0] == '-')
			throw std::runtime_error(std::string("there is no option ") + argv[i]);
		else
			words.push_back(argv[i]);
	}
	if (words.size() < 2) {
		std::fprintf(stderr, "usage: communicator GPU NIC [NIC...] [--ranks N] [--rounds N]\n");
		return 2;
	}

	std::vector<int> sockets;
	std::vector<pid_t> children;
	for (unsigned rank = 0; rank < size; rank++) {
		int pair[2];
		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
			throw std::runtime_error("socketpair");
		pid_t child = fork();
		if (child < 0)
			throw std::runtime_error("fork");
		if (child) {
			close(pair[1]);
			sockets.push_back(pair[0]);
			children.push_back(child);
			continue;
		}
		/* An end of another rank's line that stayed open here would hide that rank's death. */
		for (int other : sockets)
			close(other);
		close(pair[0]);
		try {
			run(rank, size, words[0], words[1 + rank % (words.size() - 1)], rounds, pair[1]);
			std::fflush(stdout);
			_exit(0);
		} catch (const std::exception &error) {
			std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
			_exit(1);
		}
	}
	bool good = true;
	try {
		pass_on(sockets);
	} catch (const std::exception &) {
		/* The rank that ended said why. */
		good = false;
	}
	for (int socket : sockets)
		close(socket);
	for (unsigned rank = 0; rank < size; rank++) {
		int status = 0;
		waitpid(children[rank], &status, 0);
		if (WIFSIGNALED(status))
			std::fprintf(stderr, "rank %u: ended by signal %d\n", rank, WTERMSIG(status));
		good = good && WIFEXITED(status) && !WEXITSTATUS(status);
	}
	return good ? 0 : 1;
} catch (const std::exception &error) {
	std::fprintf(stderr, "communicator: %s\n", error.what());
	return 2;
}
