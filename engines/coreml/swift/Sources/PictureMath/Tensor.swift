/// Numbers of a shape, row by row.
public struct Tensor {
    public enum Values {
        case floats([Float])
        case integers([Int32])
    }

    public let shape: [Int]
    public let values: Values

    public init(_ floats: [Float], _ shape: [Int]) {
        self.shape = shape
        values = .floats(floats)
    }

    public init(_ integers: [Int32], _ shape: [Int]) {
        self.shape = shape
        values = .integers(integers)
    }

    /// The numbers of a tensor of floats; none of one of integers.
    public var floats: [Float] {
        if case .floats(let floats) = values { return floats }
        return []
    }
}
