/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * MPI starts the ranks and carries what they have to say to each other; the data goes by libibgda.
 *
 *   mpicc -std=c11 alltoall.c -o alltoall $(pkg-config --cflags --libs ibgda)
 *   mpirun -np 4 ./alltoall GPU NIC [NIC...]
 *
 * Each rank has a QP to every other one. The address blobs of these QPs are exchanged by one MPI_Alltoall, the windows' keys
 * by one MPI_Allgather, and a barrier says when all are connected. Then each rank puts a block into every other's window
 * with a signal behind it, and checks what it gets. Rank r takes the NIC at place r of the list, counted round; on several
 * hosts, pass each the NICs of its own. MPI_Abort ends all ranks when one fails, which has said why.
 *
 * Open MPI itself uses RDMA where it can. On one host OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm keeps it off the NICs.
 *
 * The posts are a C thread's calls (ibgda_host.h). A kernel makes the same ones: examples/communicator has that form.
 */
#include <ibgda.h>
#include <ibgda_host.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 32, BLOCK_BYTES = 16384, ROUNDS = 8, PAGE = 4096 };
static const ibgda_u64 PATIENCE_NS = 30000000000ull;

/* What a rank registers, and the others write into. Slot r of what comes belongs to rank r. */
struct window {
	unsigned char out[MOST_RANKS][BLOCK_BYTES];
	unsigned char in[MOST_RANKS][BLOCK_BYTES];
	ibgda_u64 arrived[MOST_RANKS];
};

static int rank, size;

_Noreturn static void fail(const char *what, int peer, const char *why)
{
	if (peer >= 0)
		fprintf(stderr, "rank %d: %s, rank %d: %s\n", rank, what, peer, why);
	else
		fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
	fflush(stderr);
	MPI_Abort(MPI_COMM_WORLD, 1);
	exit(1);
}

static void check(const char *what, int error)
{
	if (error)
		fail(what, -1, ibgda_last_error());
}

static void check_status(const char *what, int peer, ibgda_status status, struct ibgda_qp *qp)
{
	char text[512];
	if (status == IBGDA_OK)
		return;
	/* The first error says more than one that follows from it. */
	if (qp->send_cq->error.status)
		status = (ibgda_status)qp->send_cq->error.status;
	ibgda_status_text(status, text, sizeof(text));
	fail(what, peer, text);
}

static unsigned char pattern(int from, int to, int round, int at)
{
	return (unsigned char)(at * 13 + (at >> 8) * 7 + from * 59 + to * 101 + round * 29);
}

/* The place of a slot in a window, for requests. */
#define AT(region, field, slot) ((region)->address + offsetof(struct window, field[0]) + (slot) * sizeof(((struct window *)0)->field[0]))

int main(int argc, char **argv)
{
	static unsigned char mine[MOST_RANKS][IBGDA_ADDRESS_BYTES], theirs[MOST_RANKS][IBGDA_ADDRESS_BYTES];
	struct ibgda_region region, windows[MOST_RANKS];
	struct ibgda_host_cq *cqs[MOST_RANKS] = {0};
	struct ibgda_host_qp *qps[MOST_RANKS] = {0};
	struct ibgda_qp *handles[MOST_RANKS] = {0};
	struct ibgda_context *context;
	struct ibgda_mr *mr;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	if (argc < 3)
		fail("usage", -1, "alltoall GPU NIC [NIC...]");
	if (size < 2 || size > MOST_RANKS)
		fail("mpirun -np", -1, "2 to 32 ranks");
	const char *nic = argv[2 + rank % (argc - 2)];

	const size_t bytes = (sizeof(struct window) + PAGE - 1) / PAGE * PAGE;
	struct window *own = aligned_alloc(PAGE, bytes);
	if (!own)
		fail("aligned_alloc", -1, "no memory");
	memset(own, 0, bytes);

	struct ibgda_open_attr open = {.size = sizeof(open), .port = 1, .nic = nic, .gpu = argv[1]};
	check("open", ibgda_open(&open, &context));
	check("map", ibgda_map_device(context, own, bytes, IBGDA_ACCESS_WRITE, &mr));
	check("map", ibgda_mr_region(mr, &region));
	for (int peer = 0; peer < size; peer++) {
		struct ibgda_qp_attr attr = {.size = sizeof(attr), .send_depth = 64, .access = IBGDA_ACCESS_WRITE};
		if (peer == rank)
			continue;
		check("create", ibgda_create_cq(context, 64, &cqs[peer]));
		check("create", ibgda_create_qp(context, &attr, cqs[peer], NULL, &qps[peer]));
		check("create", ibgda_qp_address(qps[peer], mine[peer]));
		check("create", ibgda_qp_device_handle(qps[peer], &handles[peer]));
	}

	/* Blob p of each rank goes to rank p: the address of the QP that is for it. */
	MPI_Alltoall(mine, IBGDA_ADDRESS_BYTES, MPI_BYTE, theirs, IBGDA_ADDRESS_BYTES, MPI_BYTE, MPI_COMM_WORLD);
	MPI_Allgather(&region, sizeof(region), MPI_BYTE, windows, sizeof(region), MPI_BYTE, MPI_COMM_WORLD);
	for (int peer = 0; peer < size; peer++)
		if (peer != rank)
			check("connect", ibgda_qp_connect(qps[peer], theirs[peer], IBGDA_ADDRESS_BYTES));
	/* Nobody posts before all are connected. */
	MPI_Barrier(MPI_COMM_WORLD);

	for (int round = 1; round <= ROUNDS; round++) {
		const ibgda_u64 deadline = ibgda_clock_ns() + PATIENCE_NS;
		for (int peer = 0; peer < size; peer++) {
			const struct ibgda_region *there = &windows[peer];
			if (peer == rank)
				continue;
			for (int at = 0; at < BLOCK_BYTES; at++)
				own->out[peer][at] = pattern(rank, peer, round, at);
			ibgda_status status = ibgda_put_signal(handles[peer], AT(there, in, rank), there->rkey, AT(&region, out, peer),
							       region.lkey, BLOCK_BYTES, AT(there, arrived, rank), there->rkey,
							       (ibgda_u64)round, 0, NULL);
			check_status("put", peer, status, handles[peer]);
		}
		for (int peer = 0; peer < size; peer++) {
			if (peer == rank)
				continue;
			check_status("what was sent", peer, ibgda_quiet(handles[peer], deadline), handles[peer]);
			ibgda_status status = ibgda_wait_until(&own->arrived[peer], IBGDA_GE, (ibgda_u64)round, deadline,
							       handles[peer]->send_cq);
			check_status("awaiting a block", peer, status, handles[peer]);
			for (int at = 0; at < BLOCK_BYTES; at++)
				if (own->in[peer][at] != pattern(peer, rank, round, at))
					fail("a block is wrong", peer, "its bytes are not those that were sent");
		}
		/* All have used up what came: it may be written over. */
		MPI_Barrier(MPI_COMM_WORLD);
	}
	printf("rank %d of %d on NIC %s: %d rounds, every byte right\n", rank, size, nic, ROUNDS);

	for (int peer = 0; peer < size; peer++) {
		ibgda_destroy_qp(qps[peer]);
		ibgda_destroy_cq(cqs[peer]);
	}
	ibgda_unmap_device(mr);
	ibgda_close(context);
	free(own);
	MPI_Finalize();
	return 0;
}
