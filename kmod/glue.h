/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Between the module's Rust and glue.c. bindgen reads this file, so it holds
 * only plain C types and forward declarations.
 */
#ifndef _IBGDA_GLUE_H
#define _IBGDA_GLUE_H

#include <linux/types.h>

struct dma_buf;
struct file;
struct ib_device;
struct page;
struct pci_dev;
struct pid;

/* What an ib_device tells at its coming, and at each change of its port. */
struct ibgda_c_port {
	u32 state;	/* enum ib_port_state; 0 when the query failed */
	u32 mbps;	/* active speed x active width */
};

int ibgda_c_client_register(void);
void ibgda_c_client_unregister(void);
bool ibgda_c_is_uverbs(struct file *file);
bool ibgda_c_dmabuf_of(struct dma_buf *dmabuf, struct file *uverbs);
bool ibgda_c_rdma_function_leaves(struct pci_dev *nic);
bool ibgda_c_same_switch(struct pci_dev *a, struct pci_dev *b);
u32 ibgda_c_domain(struct pci_dev *pdev);
bool ibgda_c_dead(struct pid *tgid);
bool ibgda_c_node_has_memory(int node);
unsigned long ibgda_c_pgprot(unsigned long prot, u32 mem_type);
u32 ibgda_c_mem_type(void *mapped, u32 asked);
int ibgda_c_set_pages_type(struct page **pages, int count, u32 mem_type);

/* In Rust: what the client of glue.c calls. */
void ibgda_nic_arrives(struct ib_device *ibdev, struct pci_dev *pdev,
		       const char *name, struct ibgda_c_port port);
void ibgda_nic_leaves(struct ib_device *ibdev);
void ibgda_nic_port(struct ib_device *ibdev, struct ibgda_c_port port);

#endif /* _IBGDA_GLUE_H */
