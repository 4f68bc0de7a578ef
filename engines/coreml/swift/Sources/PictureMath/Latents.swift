import Foundation

/// Latents as tokens and as a grid, and the position ids of their tokens: picture, row, column, text position.
public enum Latents {
    /// A grid `[channels, height, width]` as tokens `[height * width, channels]`, row by row.
    public static func pack(_ grid: [Float], channels: Int) -> [Float] {
        transposed(grid, rows: channels)
    }

    /// Tokens `[height * width, channels]` as a grid `[channels, height, width]`.
    public static func unpack(_ tokens: [Float], channels: Int) -> [Float] {
        transposed(tokens, rows: tokens.count / channels)
    }

    /// Position ids of the picture that is made, `[height * width, 4]`.
    public static func imageIds(height: Int, width: Int) -> [Int32] {
        (0..<height * width).flatMap { token -> [Int32] in [0, Int32(token / width), Int32(token % width), 0] }
    }

    /// Position ids of text, `[length, 4]`.
    public static func textIds(length: Int) -> [Int32] {
        (0..<length).flatMap { position -> [Int32] in [0, 0, 0, Int32(position)] }
    }

    /// Bytes `[height, width, 3]` of a decoder's sample `[3, height, width]`, where -1 is black; halves go to even.
    public static func pixels(_ sample: [Float]) -> [UInt8] {
        let plane = sample.count / 3
        var bytes: [UInt8] = []
        bytes.reserveCapacity(sample.count)
        for pixel in 0..<plane {
            for channel in 0..<3 {
                let unit = min(max(sample[channel * plane + pixel] / 2 + 0.5, 0), 1)
                bytes.append(UInt8((255 * unit).rounded(.toNearestOrEven)))
            }
        }
        return bytes
    }

    private static func transposed(_ values: [Float], rows: Int) -> [Float] {
        let columns = values.count / rows
        var result = [Float](repeating: 0, count: values.count)
        for row in 0..<rows {
            for column in 0..<columns {
                result[column * rows + row] = values[row * columns + column]
            }
        }
        return result
    }
}
