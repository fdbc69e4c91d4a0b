/* SPDX-License-Identifier: Apache-2.0 */
/* A library that belongs to a container image, so that a test can see the image's own libraries still resolve. */

int image_marker(void)
{
	return 42;
}
