/* SPDX-License-Identifier: Apache-2.0 */
/* A driver from before CUDA 12.0, and a cuFile that lacks what is needed: they have this alone. */
__attribute__((visibility("default"))) unsigned cuInit(unsigned flags);

unsigned cuInit(unsigned flags)
{
	return flags;
}
