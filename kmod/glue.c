// SPDX-License-Identifier: GPL-2.0
/*
 * What the Rust of Linux 7.3 cannot do: callbacks of struct ib_client (the
 * rdma headers are not among its bindings), private knowledge of uverbs, and
 * a few inline functions and macros. The comment above each says which.
 */
#include <linux/dma-buf.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/pgtable.h>
#include <linux/pid.h>
#include <linux/rcupdate.h>
#include <linux/sched/signal.h>
#include <linux/set_memory.h>
#include <linux/slab.h>
#include <linux/workqueue.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#include "../uapi/ibgda.h"
#include "glue.h"

/* The first major of uverbs, which has no header (ib_uverbs built in: no module to compare). */
#define UVERBS_MAJOR	231

struct ibgda_client_data {
	struct ib_device *ibdev;
	struct ib_event_handler handler;
	struct work_struct port_work;
};

static u32 lane_mbps(u16 speed)
{
	switch (speed) {
	case IB_SPEED_SDR: return 2500;
	case IB_SPEED_DDR: return 5000;
	case IB_SPEED_QDR: return 10000;
	case IB_SPEED_FDR10: return 10000;
	case IB_SPEED_FDR: return 14000;
	case IB_SPEED_EDR: return 25000;
	case IB_SPEED_HDR: return 50000;
	case IB_SPEED_NDR: return 100000;
	case IB_SPEED_XDR: return 200000;
	default: return 0;
	}
}

/*
 * A query is a firmware command, which a device that has just died answers
 * after a minute. Neither the client's callbacks, for which the driver waits,
 * nor the loading of this module wait for it.
 */
static void port_work(struct work_struct *work)
{
	struct ibgda_client_data *data = container_of(work, struct ibgda_client_data, port_work);
	struct ibgda_c_port port = {};
	struct ib_port_attr attr;
	int width;

	if (ib_query_port(data->ibdev, rdma_start_port(data->ibdev), &attr))
		return;
	width = ib_width_enum_to_int(attr.active_width);
	port.state = attr.state;
	port.mbps = width > 0 ? width * lane_mbps(attr.active_speed) : 0;
	ibgda_nic_port(data->ibdev, port);
}

/* What the RDMA core remembers: no command, and no speed. */
static struct ibgda_c_port known_port(struct ib_device *ibdev)
{
	struct ibgda_c_port port = {};
	enum ib_port_state state;

	if (!ib_get_cached_port_state(ibdev, rdma_start_port(ibdev), &state))
		port.state = state;
	return port;
}

static void client_event(struct ib_event_handler *handler, struct ib_event *event)
{
	struct ibgda_client_data *data = container_of(handler, struct ibgda_client_data, handler);

	switch (event->event) {
	case IB_EVENT_PORT_ACTIVE:
	case IB_EVENT_PORT_ERR:
		if (event->element.port_num == rdma_start_port(event->device))
			queue_work(system_dfl_wq, &data->port_work);
		break;
	default:
		break;
	}
}

static struct pci_dev *pci_function_of(struct ib_device *ibdev)
{
	struct device *parent = ibdev->dev.parent;

	return parent && dev_is_pci(parent) ? to_pci_dev(parent) : NULL;
}

static int client_add(struct ib_device *ibdev);
static void client_remove(struct ib_device *ibdev, void *client_data);

static struct ib_client client = {
	.name = "ibgda",
	.add = client_add,
	.remove = client_remove,
	.no_kverbs_req = 1,
};

static int client_add(struct ib_device *ibdev)
{
	struct pci_dev *pdev = pci_function_of(ibdev);
	struct ibgda_client_data *data;

	if (!pdev || ibdev->ops.driver_id != RDMA_DRIVER_MLX5)
		return -EOPNOTSUPP;
	data = kzalloc_obj(*data);
	if (!data)
		return -ENOMEM;
	data->ibdev = ibdev;
	INIT_WORK(&data->port_work, port_work);
	ib_set_client_data(ibdev, &client, data);
	ibgda_nic_arrives(ibdev, pdev, dev_name(&ibdev->dev), known_port(ibdev));
	INIT_IB_EVENT_HANDLER(&data->handler, ibdev, client_event);
	ib_register_event_handler(&data->handler);
	queue_work(system_dfl_wq, &data->port_work);
	return 0;
}

static void client_remove(struct ib_device *ibdev, void *client_data)
{
	struct ibgda_client_data *data = client_data;

	ib_unregister_event_handler(&data->handler);
	/*
	 * Waits for a query that runs: the driver ended all commands before
	 * it came here, if the device is dead.
	 */
	cancel_work_sync(&data->port_work);
	ibgda_nic_leaves(ibdev);
	kfree(data);
}

/* struct ib_client. */
int ibgda_c_client_register(void)
{
	return ib_register_client(&client);
}

/* struct ib_client. */
void ibgda_c_client_unregister(void)
{
	ib_unregister_client(&client);
}

/* S_ISCHR() and MAJOR(); struct module's name. */
bool ibgda_c_is_uverbs(struct file *file)
{
	struct module *owner = file->f_op->owner;

	if (!S_ISCHR(file_inode(file)->i_mode))
		return false;
#ifdef CONFIG_MODULES
	if (owner)
		return !strcmp(owner->name, "ib_uverbs");
#endif
	return MAJOR(file_inode(file)->i_rdev) == UVERBS_MAJOR;
}

/*
 * struct ib_uobject. The dma-buf that uverbs exports has its struct
 * ib_uverbs_dmabuf_file as priv, whose first member is the uobject; and the
 * uverbs character device has its struct ib_uverbs_file as private_data.
 * The reference on the dma-buf keeps the uobject.
 */
bool ibgda_c_dmabuf_of(struct dma_buf *dmabuf, struct file *uverbs)
{
	struct ib_uobject *uobject = dmabuf->priv;

	if (!dmabuf->exp_name || strcmp(dmabuf->exp_name, "ib_uverbs") ||
	    dmabuf->owner != uverbs->f_op->owner)
		return false;
	return uobject && uobject->ufile == uverbs->private_data;
}

static int is_rdma_function(struct device *dev, const void *unused)
{
	/* mlx5_core names its auxiliary devices mlx5_core.<kind>.<id>. */
	return dev->bus && !strcmp(dev->bus->name, "auxiliary") &&
	       strstr(dev_name(dev), ".rdma.");
}

/*
 * Whether mlx5_core is taking its RDMA function away (a reset, or its own
 * removal) rather than mlx5_ib being unbound from it: a device that is being
 * deleted has left its parent's list of children when its driver lets go.
 * In C for the match callback and dev_name().
 */
bool ibgda_c_rdma_function_leaves(struct pci_dev *nic)
{
	struct device *child = device_find_child(&nic->dev, NULL, is_rdma_function);

	put_device(child);
	return !child;
}

static bool redirects(struct pci_dev *pdev)
{
	u16 control = 0;

	if (!pdev->acs_cap)
		return false;
	pci_read_config_word(pdev, pdev->acs_cap + PCI_ACS_CTRL, &control);
	return control & (PCI_ACS_RR | PCI_ACS_CR | PCI_ACS_EC);
}

/*
 * Whether transactions between the two turn round below a common bridge, and
 * not in the root complex: pci_p2pdma_distance_many() does not tell.
 * pci_upstream_bridge() is inline.
 */
bool ibgda_c_same_switch(struct pci_dev *a, struct pci_dev *b)
{
	struct pci_dev *up, *down;

	for (up = a; up; up = pci_upstream_bridge(up)) {
		if (redirects(up))
			return false;
		for (down = b; down && down != up; down = pci_upstream_bridge(down))
			;
		if (!down)
			continue;
		for (down = b; down != up; down = pci_upstream_bridge(down))
			if (redirects(down))
				return false;
		return true;
	}
	return false;
}

/* pci_domain_nr() is inline. */
u32 ibgda_c_domain(struct pci_dev *pdev)
{
	return pci_domain_nr(pdev->bus);
}

/*
 * Whether every thread of the process is gone, and with it every file it had:
 * the tasks' works run before exit_state is set. A leader alone may be a
 * zombie while other threads live. thread_group_empty() is inline.
 */
bool ibgda_c_dead(struct pid *tgid)
{
	struct task_struct *leader;
	bool dead;

	rcu_read_lock();
	leader = pid_task(tgid, PIDTYPE_TGID);
	dead = !leader || (READ_ONCE(leader->exit_state) && thread_group_empty(leader));
	rcu_read_unlock();
	return dead;
}

/* node_state() is inline. */
bool ibgda_c_node_has_memory(int node)
{
	return node >= 0 && node < nr_node_ids && node_state(node, N_MEMORY);
}

/* pgprot_noncached() is a macro. */
unsigned long ibgda_c_pgprot(unsigned long prot, u32 mem_type)
{
	switch (mem_type) {
	case IBGDA_MEM_WC:
		return pgprot_val(pgprot_writecombine(__pgprot(prot)));
	case IBGDA_MEM_UC:
		return pgprot_val(pgprot_noncached(__pgprot(prot)));
	default:
		return prot;
	}
}

/*
 * The type that is in force for a page that the kernel maps. On x86 the kernel gives
 * an address one type for all its mappings and changes later requests
 * silently; elsewhere each mapping has what it asked for. pte_val() and the
 * page-table bits are macros.
 */
u32 ibgda_c_mem_type(void *mapped, u32 asked)
{
#ifdef CONFIG_X86
	unsigned int level;
	pte_t *pte = lookup_address((unsigned long)mapped, &level);
	u64 bits;

	if (!pte)
		return IBGDA_MEM_WB;
	bits = pte_val(*pte) & _PAGE_CACHE_MASK;
	if (bits == (pgprot_val(pgprot_writecombine(PAGE_KERNEL)) & _PAGE_CACHE_MASK))
		return IBGDA_MEM_WC;
	return bits ? IBGDA_MEM_UC : IBGDA_MEM_WB;
#else
	return asked;
#endif
}

/*
 * Gives pages a type, in the kernel's own mapping of them. Only x86 has such
 * functions, which its Rust bindings do not have, and page_address() is a
 * macro. Without PAT the kernel takes UC for WC and says that it did well.
 */
int ibgda_c_set_pages_type(struct page **pages, int count, u32 mem_type)
{
#ifdef CONFIG_X86
	int error;

	switch (mem_type) {
	case IBGDA_MEM_WC:
		error = set_pages_array_wc(pages, count);
		break;
	case IBGDA_MEM_UC:
		error = set_pages_array_uc(pages, count);
		break;
	default:
		return set_pages_array_wb(pages, count);
	}
	if (error)
		return error;
	if (ibgda_c_mem_type(page_address(pages[0]), mem_type) == mem_type)
		return 0;
	error = set_pages_array_wb(pages, count);
	return error ?: -EOPNOTSUPP;
#else
	return -EOPNOTSUPP;
#endif
}
