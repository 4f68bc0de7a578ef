import Foundation

/// Normally distributed numbers from a seed, as `mlx.random.normal` and `intaglio run --rng mlx` draw them: Threefry-2x32
/// of 20 rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405) in counter mode, and the inverse error function in
/// single precision (Giles 2012). Where the system's logarithm rounds differently, the last bit of a number can differ.
public enum Noise {
    /// `count` numbers of mean 0 and variance 1.
    public static func normals(count: Int, seed: UInt64) -> [Float] {
        let least: Float = 0x1p-24 - 1
        let root = Float(2).squareRoot()
        return words(count: count, seed: seed).map { word in
            // Words near 2**32 round up to it.
            let unit = min(Float(word) / 0x1p32, 1 - 0x1p-24)
            let x = 2 * unit + least
            let product = x * inverseErrorRatio(logf(Float(1).addingProduct(x, -x)))
            return root * product
        }
    }

    /// The words of a key: the counter's halves are i and i + half of the words.
    static func words(count: Int, seed: UInt64) -> [UInt32] {
        let half = (count + 1) / 2
        let key = (UInt32(truncatingIfNeeded: seed >> 32), UInt32(truncatingIfNeeded: seed))
        var low: [UInt32] = []
        var high: [UInt32] = []
        for i in 0..<half {
            // Of an odd number of words the middle one has no partner.
            let second = i < count / 2 ? UInt32(i + half) : 0
            let pair = threefry(key, UInt32(i), second)
            low.append(pair.0)
            high.append(pair.1)
        }
        return low + high.prefix(count / 2)
    }

    private static func threefry(_ key: (UInt32, UInt32), _ first: UInt32, _ second: UInt32) -> (UInt32, UInt32) {
        let keys: [UInt32] = [key.0, key.1, key.0 ^ key.1 ^ 0x1BD1_1BDA]
        let rotations: [[UInt32]] = [[13, 15, 26, 6], [17, 29, 16, 24]]
        var a = first &+ keys[0]
        var b = second &+ keys[1]
        for group in 0..<5 {
            for rotation in rotations[group % 2] {
                a = a &+ b
                b = ((b << rotation) | (b >> (32 - rotation))) ^ a
            }
            a = a &+ keys[(group + 1) % 3]
            b = b &+ keys[(group + 2) % 3] &+ UInt32(group + 1)
        }
        return (a, b)
    }

    /// The inverse error function divided by its argument x, of t = log(1 - x * x).
    private static func inverseErrorRatio(_ t: Float) -> Float {
        let coefficients = abs(t) > 6.125 ? tail : centre
        return coefficients.dropFirst().reduce(coefficients[0]) { total, coefficient in
            coefficient.addingProduct(total, t)
        }
    }

    private static let centre: [Float] = [
        5.43877832e-9, 1.43285448e-7, 1.22774793e-6, 1.12963626e-7, -5.61530760e-5,
        -1.47697632e-4, 2.31468678e-3, 1.15392581e-2, -2.32015476e-1, 8.86226892e-1,
    ]
    private static let tail: [Float] = [
        3.03697567e-10, 2.93243101e-8, 1.22150334e-6, 2.84108955e-5, 3.93552968e-4,
        3.02698812e-3, 4.83185798e-3, -2.64646143e-1, 8.40016484e-1,
    ]
}
