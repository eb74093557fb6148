// The kernel of a partial update; compiled by nvcc into the C++ module, or by NVRTC for CuPy.

extern "C" __device__ float blurred(const float* object, long long height, long long width,
                                    long long row, long long column) {
    float sum = 0;
    for (long long r = row > 0 ? row - 1 : 0; r <= row + 1 && r < height; ++r)
        for (long long c = column > 0 ? column - 1 : 0; c <= column + 1 && c < width; ++c)
            sum += (r == row ? 2 : 1) * (c == column ? 2 : 1) * object[r * width + c];
    return sum / 16;
}

extern "C" __global__ void partial_update(const float* object, long long height, long long width,
                                          const float* images, long long count, long long rows,
                                          long long columns, const int* places, float* update,
                                          float* weight) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long k = blockIdx.x * (long long)blockDim.x + threadIdx.x; k < count * rows * columns;
         k += step) {
        const long long i = k / (rows * columns);
        const long long r = places[2 * i] + k / columns % rows;
        const long long c = places[2 * i + 1] + k % columns;
        if (r < 0 || c < 0 || r >= height || c >= width) continue;
        atomicAdd(&update[r * width + c], images[k] - blurred(object, height, width, r, c));
        atomicAdd(&weight[r * width + c], 1.0f);
    }
}
