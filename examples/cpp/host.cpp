// Partial updates on the host, on NumPy arrays by DLPack.

#include "views.hpp"

#include <algorithm>

namespace {

using views::View;

float blurred(const float* object, int64_t height, int64_t width, int64_t row, int64_t column) {
    float sum = 0;
    for (int64_t r = std::max<int64_t>(row - 1, 0); r <= std::min(row + 1, height - 1); ++r)
        for (int64_t c = std::max<int64_t>(column - 1, 0); c <= std::min(column + 1, width - 1); ++c)
            sum += (r == row ? 2 : 1) * (c == column ? 2 : 1) * object[r * width + c];
    return sum / 16;
}

// Adds to `update` what the images say of the object, and to `weight` how often they say it.
void partial_update(const py::object& object_, const py::object& images_,
                    const py::object& places_, const py::object& update_,
                    const py::object& weight_) {
    auto object = views::from_dlpack<float>(object_, views::CPU, 0);
    auto images = views::from_dlpack<float>(images_, views::CPU, 0);
    auto places = views::from_dlpack<int32_t>(places_, views::CPU, 0);
    auto update = views::from_dlpack<float>(update_, views::CPU, 0);
    auto weight = views::from_dlpack<float>(weight_, views::CPU, 0);
    object.expect(2, "object");
    images.expect(3, "images");
    places.expect(2, "places");
    if (update.shape != object.shape || weight.shape != object.shape ||
        places.shape != std::vector<int64_t>{images.shape[0], 2})
        throw std::invalid_argument("shapes do not belong together");
    const int64_t height = object.shape[0], width = object.shape[1];
    const int64_t rows = images.shape[1], columns = images.shape[2];

    for (int64_t i = 0; i < images.shape[0]; ++i) {
        const int64_t top = places.data[2 * i], left = places.data[2 * i + 1];
        if (top < 0 || left < 0 || top + rows > height || left + columns > width)
            throw std::invalid_argument("an image lies outside of the object");
    }
    py::gil_scoped_release others_run;
    for (int64_t i = 0; i < images.shape[0]; ++i) {
        const int64_t top = places.data[2 * i], left = places.data[2 * i + 1];
        for (int64_t r = top; r < top + rows; ++r)
            for (int64_t c = left; c < left + columns; ++c) {
                const float seen = images.data[(i * rows + r - top) * columns + c - left];
                update.data[r * width + c] += seen - blurred(object.data, height, width, r, c);
                weight.data[r * width + c] += 1;
            }
    }
}

}  // namespace

PYBIND11_MODULE(reconstruct_host, module) {
    module.def("partial_update", &partial_update);
}
